"""The tokenizer that a store carries along."""

from pathlib import Path

from forge_core.errors import DataError
from forge_core.protocols.data import Tokenizer
from forge_data.store.manifest import TOKENIZER
from forge_data.store.reader import StoreSource
from forge_data.tokenizers.restore import restore


def tokenizer_of(store: StoreSource) -> Tokenizer | None:
    """The tokenizer that made a store, or None when the store has no copy of it.

    Raises:
        DataError: the copy is damaged or not the one that the manifest names.
    """
    entry = store.manifest.tokenizer
    path = Path(store.path) / TOKENIZER
    if entry is None or not path.exists():
        return None
    tokenizer = restore(path.read_bytes(), entry.eos, str(path), entry.add_special_tokens)
    if tokenizer.fingerprint != entry.sha256:
        raise DataError(f"{path} is not the tokenizer that the manifest names (sha256 {entry.sha256[:12]}); restore the file")
    return tokenizer
