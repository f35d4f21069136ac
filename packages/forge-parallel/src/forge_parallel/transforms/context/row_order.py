"""Which positions of a row each rank holds when ranks split it. Integers only; does not import torch.

Under a causal mask, position t sees t + 1 positions, so the last of several contiguous shares would have almost twice the average
work. In the balanced order, a row is split into 2 R pieces, and rank r of R holds pieces r and 2 R - 1 - r: then every rank has
the same work, in total and for the keys of each other rank.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class SequenceOrder:
    """How `ranks` ranks split a row: two pieces each in the balanced order, otherwise one contiguous share."""

    ranks: int
    balanced: bool

    @property
    def pieces(self) -> int:
        """Number of pieces of equal length into which a row is split; it must divide the row's length."""
        return 2 * self.ranks if self.balanced else self.ranks

    def spans(self, rank: int, length: int) -> tuple[range, ...]:
        """Returns the positions of a row of `length` that `rank` holds, in ascending order."""
        size = length // self.pieces
        held = (rank, self.pieces - 1 - rank) if self.balanced else (rank,)
        return tuple(range(piece * size, (piece + 1) * size) for piece in held)
