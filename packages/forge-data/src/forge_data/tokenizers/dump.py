"""Restores tokenizers of any kind from their `dump`, or from the copy in a store."""

import json
from pathlib import Path

from forge_core.errors import DataError
from forge_core.protocols.data import Tokenizer
from forge_data.sources.store import TOKENIZER, StoreSource
from forge_data.tokenizers import sentencepiece, tiktoken
from forge_data.tokenizers.bytes import ByteTokenizer


def restore(content: bytes, eos: int | None, where: str, add_special_tokens: bool = True) -> Tokenizer:
    """Restores the tokenizer whose `dump` is `content`.

    Args:
        content: a JSON file: a format of Forge, or a `tokenizer.json` of the `tokenizers` library.
        eos: id of the end of document, which a `tokenizer.json` does not state.
        where: name of the tokenizer for messages.
        add_special_tokens: whether `prefix` and `suffix` are those of the post-processor of a `tokenizer.json`; formats of
            Forge state this themselves.

    Raises:
        DataError: the content is not a tokenizer of a known format.
    """
    try:
        parsed = json.loads(content)
        kind = parsed.get("type")
    except (ValueError, AttributeError) as error:
        raise DataError(f"{where} is not a tokenizer: {error}") from error
    try:
        if kind == ByteTokenizer.kind:
            return ByteTokenizer()
        if kind == tiktoken.KIND:
            return tiktoken.restore(parsed)
        if kind == sentencepiece.KIND:
            return sentencepiece.restore(parsed, where)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{where} is a damaged tokenizer: {type(error).__name__} {error}") from error
    return _restore_backend(content, eos, where, add_special_tokens)


def _restore_backend(content: bytes, eos: int | None, where: str, add_special_tokens: bool) -> Tokenizer:
    from tokenizers import Tokenizer as Backend

    from forge_data.tokenizers.bpe import BpeTokenizer

    try:
        name = Backend.from_str(content.decode("utf-8")).id_to_token(eos) if eos is not None else None
    except Exception as error:  # the library raises bare Exception for anything that it cannot read
        raise DataError(f"{where} is not a tokenizer.json of the tokenizers library: {error}") from error
    return BpeTokenizer(content, name or "", where, add_special_tokens)


def tokenizer_of(store: StoreSource, known: Tokenizer | None = None) -> Tokenizer | None:
    """Returns the tokenizer of a store, or None if the store has no copy of it.

    If `known` is the tokenizer that the store was made with, it is returned itself: the copy of a plugin's tokenizer has a format
    that Forge cannot read.

    Raises:
        DataError: the copy is damaged, or does not match the manifest.
    """
    entry = store.manifest.tokenizer
    path = Path(store.path) / TOKENIZER
    if entry is None or not path.exists():
        return None
    if known is not None and known.fingerprint == entry.sha256:
        return known
    tokenizer = restore(path.read_bytes(), entry.eos, str(path), entry.add_special_tokens)
    if tokenizer.fingerprint != entry.sha256:
        raise DataError(f"{path} is not the tokenizer that the manifest names (sha256 {entry.sha256[:12]}); restore the file")
    return tokenizer
