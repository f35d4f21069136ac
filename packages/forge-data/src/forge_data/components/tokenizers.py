"""Tokenizers that a recipe selects by `[data.tokenizer]`."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge

from forge_core.component import DATA, IDENTITY, Component

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from forge_core.protocols.data import SourceContext, Tokenizer


@dataclass(frozen=True, kw_only=True)
class Bytes(Component):
    """UTF-8 bytes as tokens 0 to 255, end of document 256. Nothing to train."""

    def build(self, context: "SourceContext") -> "Tokenizer":
        from forge_data.tokenizers.bytes import ByteTokenizer

        return ByteTokenizer()

    def tokens_of(self, text: str) -> int:
        """How many tokens a text is, without building the tokenizer."""
        return len(text.encode("utf-8", "replace"))


@dataclass(frozen=True, kw_only=True)
class Bpe(Component):
    """Byte-level byte-pair encoding (Sennrich et al., 2016; bytes as in GPT-2), trained once or loaded from a file."""

    key_class: ClassVar = IDENTITY

    vocab_size: Annotated[int, Ge(257)] = 4096
    """Largest vocabulary of a trained tokenizer: 256 bytes, the end of document, and merges."""
    path: Annotated[str | None, DATA] = None
    """A `tokenizer.json` of the `tokenizers` library to load instead of training."""
    files: Annotated[tuple[str, ...], DATA] = ()
    """Text files or patterns to train on; by default the recipe's text sources."""
    eos: str = "<|endoftext|>"
    """The token that ends a document; in a loaded tokenizer it must exist."""
    min_frequency: Annotated[int, Ge(1)] = 2
    """A pair that occurs less often is not merged."""
    train_bytes: Annotated[int, Ge(1)] = 1_000_000_000
    """Training reads documents in order until it has seen so much text."""
    add_special_tokens: Annotated[bool, DATA] = True
    """Whether documents begin and end with what the tokenizer's own rule adds, such as a BOS; false for runs begun without."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Bpe]":
        """A few merges."""
        return (cls(vocab_size=300),)

    def build(self, context: "SourceContext") -> "Tokenizer":
        from forge_data.tokenizers.bpe import BpeSettings, load, train

        if self.path is not None:
            return load(self.path, self.eos, self.add_special_tokens)
        settings = BpeSettings(
            vocab_size=self.vocab_size,
            files=self.files,
            eos=self.eos,
            min_frequency=self.min_frequency,
            train_bytes=self.train_bytes,
        )
        return train(settings, context)


@dataclass(frozen=True, kw_only=True)
class Tiktoken(Component):
    """A byte-pair encoding of the `tiktoken` library."""

    key_class: ClassVar = IDENTITY

    encoding: str = "gpt2"
    """Name that the library knows, such as `gpt2`, `cl100k_base` or `o200k_base`; fetched once, then in its cache."""
    path: Annotated[str | None, DATA] = None
    """A file of ranks (a base64 token and its rank on each line) to load instead; needs `pattern`."""
    pattern: str | None = None
    """Of a file of ranks: the regular expression that cuts text before merging."""
    special_tokens: dict[str, int] = field(default_factory=dict)
    """Of a file of ranks: special strings and their ids; by default `eos` alone, after the last rank."""
    eos: str = "<|endoftext|>"
    """The special string that ends a document."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Tiktoken]":
        """A file of ranks: a named encoding would be fetched."""
        from forge_data import example_corpus

        return (cls(path=example_corpus.ranks(folder), pattern=r"\s+|\S+"),)

    def build(self, context: "SourceContext") -> "Tokenizer":
        from forge_data.tokenizers.tiktoken import load_encoding, load_ranks

        if self.path is None:
            return load_encoding(self.encoding, self.eos)
        return load_ranks(self.path, pattern=self.pattern, special_tokens=self.special_tokens, eos=self.eos)


@dataclass(frozen=True, kw_only=True)
class SentencePiece(Component):
    """A model of the `sentencepiece` library."""

    key_class: ClassVar = IDENTITY

    path: Annotated[str, DATA]
    """The `.model` file."""
    eos: str | None = None
    """The piece that ends a document; by default the model's own end of sentence."""
    add_special_tokens: Annotated[bool, DATA] = True
    """Whether documents begin and end with BOS and EOS where the `tokenizer_config.json` next to the model says so."""

    lossless: ClassVar[bool] = False

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[SentencePiece]":
        """A small model, which normalizes text and does not know every character."""
        from forge_data import example_corpus

        return (cls(path=example_corpus.pieces(folder)),)

    def build(self, context: "SourceContext") -> "Tokenizer":
        from forge_data.tokenizers.sentencepiece import load

        return load(self.path, self.eos, self.add_special_tokens)
