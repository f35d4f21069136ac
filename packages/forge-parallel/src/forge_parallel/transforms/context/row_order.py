"""Which places of a row each of the ranks holds that split it. Integers only; torch is not imported.

Under a causal mask place t sees t + 1 places, so contiguous shares would give the last rank almost twice the average work.
In the balanced order a row is cut into 2 R pieces and rank r of R holds pieces r and 2 R - 1 - r: every rank then has the
same work, in total and against the keys of each other rank.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class SequenceOrder:
    """How `ranks` ranks share the places of a row: two pieces each in the balanced order, one contiguous share otherwise."""

    ranks: int
    balanced: bool

    @property
    def pieces(self) -> int:
        """Into how many pieces of equal length a row is cut; it must divide the row's length."""
        return 2 * self.ranks if self.balanced else self.ranks

    def spans(self, rank: int, length: int) -> tuple[range, ...]:
        """The places, in ascending order, of a row of `length` that `rank` holds."""
        size = length // self.pieces
        held = (rank, self.pieces - 1 - rank) if self.balanced else (rank,)
        return tuple(range(piece * size, (piece + 1) * size) for piece in held)
