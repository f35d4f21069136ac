"""What fixes the rows of a run besides the content of its sources."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from forge_data.section import Data

Marks = Literal["documents", "mask", "none"]
"""What rows have besides tokens and labels: documents and positions, which tell padding too; a mask of padding; or nothing."""


@dataclass(frozen=True)
class LoadSpec:
    """Plain data: equal specs and equal sources give equal rows in every process.

    Attributes:
        data: the recipe's `[data]` table.
        workspace: directory of prepared data.
        seed: of the order of samples.
        global_batch: rows per optimizer step over all ranks.
        vocab_size: of the model; a larger token id is refused. None: not known.
        model: the model component, for sources that prepare what it takes besides tokens.
    """

    data: Data
    workspace: Path
    seed: int = 0
    global_batch: int = 1
    vocab_size: int | None = None
    model: Any = None

    @property
    def marks(self) -> Marks:
        """How padding is told in training. Where documents are ignored, only packings that keep them whole have some."""
        return "documents" if self.masked else "none" if self.data.packing == "concatenate" else "mask"

    @property
    def masked(self) -> bool:
        """Whether rows come with positions and documents."""
        return self.data.documents == "mask"
