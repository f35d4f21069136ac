"""Tokenizers, which implement `forge_core.protocols.Tokenizer`: text to token ids and back.

    from forge_data.tokenizers import ByteTokenizer

    tokenizer = ByteTokenizer()
    ids = list(tokenizer.encode("one token per byte"))
    assert len(ids) == 18 and tokenizer.decode(ids) == "one token per byte"

A recipe chooses a tokenizer by its component: `forge_data.Bpe`, `Bytes`, `SentencePiece` or `Tiktoken`.
"""

from typing import TYPE_CHECKING

from forge_core.exports import lazy_exports

if TYPE_CHECKING:
    from forge_data.tokenizers.bpe import BpeSettings, BpeTokenizer
    from forge_data.tokenizers.bytes import ByteTokenizer
    from forge_data.tokenizers.dump import tokenizer_of
    from forge_data.tokenizers.sentencepiece import SentencePieceTokenizer
    from forge_data.tokenizers.tiktoken import TiktokenTokenizer, load_encoding

__all__ = [
    "BpeSettings",
    "BpeTokenizer",
    "ByteTokenizer",
    "SentencePieceTokenizer",
    "TiktokenTokenizer",
    "load_encoding",
    "tokenizer_of",
]
__getattr__, __dir__ = lazy_exports(__name__)
