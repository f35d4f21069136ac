"""Sources that a recipe selects by `[[data.sources]]` or `[data.evaluation.NAME]`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt, Lt

from forge_core.protocols.data import SourceComponent

if TYPE_CHECKING:
    from forge_core.protocols.data import Source, SourceContext, Texts

Split = Literal["all", "train", "held_out"]
Fraction = Annotated[float, Gt(0), Lt(1)]


@dataclass(frozen=True, kw_only=True)
class Store(SourceComponent):
    """A token store: a directory with `manifest.json` and memory-mapped shards, as `data prepare` writes it."""

    path: str
    """Directory of the store."""

    def build(self, context: "SourceContext") -> "Source":
        from forge_data.sources.store import open_store

        return open_store(self.path, context.tokenizer)


@dataclass(frozen=True, kw_only=True)
class Text(SourceComponent):
    """UTF-8 text files, one document a file; tokenised once into a store in the workspace."""

    path: str
    """A file, a directory (all `.txt` and `.md` below it), or a pattern such as `corpus/**/*.txt`."""
    split: Split = "all"
    """Files are assigned to `train` or `held_out` by a hash of their relative path."""
    held_out: Fraction = 0.05
    """Fraction of files in the split `held_out`."""

    def texts(self) -> "Texts":
        from forge_data.sources.text import text_files

        return text_files(self.path, self.split, self.held_out)

    def build(self, context: "SourceContext") -> "Source":
        from forge_data.prepare import prepared

        return prepared(self.texts(), context, "text")


@dataclass(frozen=True, kw_only=True)
class Stdlib(SourceComponent):
    """Real text that every machine has: source and docstrings of the installed Python standard library."""

    split: Split = "train"
    """Files are assigned to `train` or `held_out` by a hash of their relative path."""
    held_out: Fraction = 0.05
    """Fraction of files in the split `held_out`."""

    def texts(self) -> "Texts":
        from forge_data.sources.stdlib import stdlib_files

        return stdlib_files(self.split, self.held_out)

    def build(self, context: "SourceContext") -> "Source":
        from forge_data.prepare import prepared

        return prepared(self.texts(), context, "stdlib")


@dataclass(frozen=True, kw_only=True)
class Tokens(SourceComponent):
    """One file of token ids: `.npy` with its header, or raw little-endian integers with a stated dtype."""

    path: str
    """The file."""
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] | None = None
    """Of a raw file, where it is required; in a `.npy` file the header says it."""
    eos: Annotated[int, Ge(0)] | None = None
    """Id of the token that ends a document; without it the file is one document."""
    vocab_size: Annotated[int, Gt(0)] | None = None
    """Of the tokenizer that made the file, if known."""

    def build(self, context: "SourceContext") -> "Source":
        from forge_data.sources.tokens import open_tokens

        return open_tokens(self)


@dataclass(frozen=True, kw_only=True)
class Random(SourceComponent):
    """Uniform random tokens, a function of (seed, position): nothing can be learned from them beyond ln(vocab_size)."""

    vocab_size: Annotated[int, Gt(1)]
    """Ids are drawn from 0 to vocab_size - 1."""
    tokens: Annotated[int, Gt(0)] = 1_000_000
    """Length of the stream."""
    document: Annotated[int, Gt(0)] | None = None
    """Tokens of a document; by default all is one document."""
    seed: Annotated[int, Ge(0)] = 0
    """Another seed gives other tokens."""

    def build(self, context: "SourceContext") -> "Source":
        from forge_data.sources.random import RandomSource

        return RandomSource(self)
