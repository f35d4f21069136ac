"""What sources, tokenizers and the trainer agree on."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from annotated_types import Ge

from forge_core.batch import Batch
from forge_core.component import Component

if TYPE_CHECKING:
    import numpy as np


class Tokenizer(Protocol):
    """Text to token ids and back."""

    vocab_size: int
    eos: int | None
    fingerprint: str

    def encode(self, text: str) -> "np.ndarray":
        """Token ids without any special token added."""
        ...

    def decode(self, ids: "list[int]") -> str: ...


class Source(Protocol):
    """Tokens with random access: one long stream cut into documents.

    `ends()` is a (documents,) uint64 array, possibly memory-mapped, of where each document ends in the stream.
    """

    name: str
    fingerprint: str
    tokens: int
    vocab_size: int | None

    def ends(self) -> "np.ndarray": ...

    def read(self, start: int, stop: int) -> "np.ndarray":
        """Token ids [start, stop) of the stream, in the stored dtype."""
        ...


@dataclass(frozen=True, kw_only=True)
class SourceComponent(Component):
    """Base of every component of `forge.sources`: the keys that the mixture reads."""

    weight: Annotated[float, Ge(0)] = 1.0
    """Share of the mixture relative to the other sources; 0 means never."""
    label: str | None = None
    """Name of the source in logs and phases; by default derived from the component's name."""


@dataclass(frozen=True)
class SourceContext:
    """What a source or tokenizer may use while it is built.

    Attributes:
        workspace: a directory of the run where prepared data may be kept.
        tokenizer: of `[data.tokenizer]`, or None.
        sequence_length: tokens of one sample.
        report: called with progress messages.
    """

    workspace: Path
    tokenizer: Tokenizer | None
    sequence_length: int
    report: Any


Cursor = Mapping[str, Any]
"""Position in the data: a few integers and a fingerprint, the same on every rank, JSON as it stands."""


class Stream(Protocol):
    """What the loop reads: endless, or ending after the last full global batch of the last epoch."""

    def start(self) -> Cursor:
        """The cursor of step 0."""
        ...

    def from_cursor(self, cursor: Cursor) -> "Iterator[tuple[list[Batch], Cursor]]":
        """Per optimizer step: this rank's micro-batches and the cursor *after* them.

        Raises:
            DataError: the cursor belongs to other data; names the difference.
        """
        ...
