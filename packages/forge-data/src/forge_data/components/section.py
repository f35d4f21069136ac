"""The recipe's `[data]` table."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from forge_core.component import Component, Slot


@dataclass(frozen=True, kw_only=True)
class Data:
    """What is read, in which order, cut how."""

    sequence_length: Annotated[int, Gt(0)] = 1024
    """Tokens of one sample."""
    packing: Literal["concatenate"] = "concatenate"
    """How documents become rows: `concatenate` cuts the stream of documents every `sequence_length` tokens."""
    documents: Literal["mask", "ignore"] = "mask"
    """`mask`: attention and positions stop at document borders; `ignore`: each row is read as one document. Labels
    never cross a border, in either case."""
    sources: list[Annotated[Component, Slot("forge.sources")]] = field(default_factory=list)
    """Where documents come from, mixed by their weights."""
    tokenizer: Annotated[Component | None, Slot("forge.tokenizers")] = None
    """Text to token ids; needed by sources of text, checked against sources of tokens."""
    evaluation: dict[str, Annotated[Component, Slot("forge.sources")]] = field(default_factory=dict)
    """Held-out sets by name, read in order, each row once."""
    shuffle: Literal["permute", "none"] = "permute"
    """`permute`: every epoch of a source in another random order; `none`: as stored."""
    seed: Annotated[int, Ge(0)] | None = None
    """Fixes the order of samples; by default the seed of the job."""
    epochs: Annotated[int, Gt(0)] | None = None
    """The stream ends before any source would be read more often than this; by default it never ends."""
    workers: Annotated[int, Gt(0)] | None = None
    """Threads that tokenise text; by default one per core. The result does not depend on it."""
