"""The tokenizer that a store carries along."""

import json
from pathlib import Path

from forge_core.errors import DataError
from forge_core.protocols.data import Tokenizer
from forge_data.sources.manifest import TOKENIZER
from forge_data.sources.store import StoreSource
from forge_data.tokenizers.bytes import KIND, ByteTokenizer


def tokenizer_of(store: StoreSource) -> Tokenizer | None:
    """The tokenizer that made a store, or None when the store has no copy of it.

    Raises:
        DataError: the copy is damaged or not the one that the manifest names.
    """
    entry = store.manifest.tokenizer
    path = Path(store.path) / TOKENIZER
    if entry is None or not path.exists():
        return None
    content = path.read_bytes()
    try:
        kind = json.loads(content).get("type")
    except (ValueError, AttributeError) as error:
        raise DataError(f"{path} is no tokenizer: {error}") from error
    tokenizer = ByteTokenizer() if kind == KIND else _bpe(content, entry.eos, path)
    if tokenizer.fingerprint != entry.sha256:
        raise DataError(f"{path} is not the tokenizer that the manifest names (sha256 {entry.sha256[:12]}); restore the file")
    return tokenizer


def _bpe(content: bytes, eos: int | None, path: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Backend

    from forge_data.tokenizers.bpe import BpeTokenizer

    name = Backend.from_str(content.decode("utf-8")).id_to_token(eos) if eos is not None else None
    return BpeTokenizer(content, name or "", str(path))
