"""Which source a sample comes from: draws of several sources in exact shares, found by arithmetic at any sample.

Shares are whole numbers of draws in a period, however long it is (`weights.shares_of`); none is rounded. Where the period
is short, a table of it keeps every count within one sample of its share (`chairman`); else a tree of two-way splits keeps
it within 1.68 samples (`nested`). Neither deviation grows with the number of samples.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol

import numpy as np

from forge_data.order.chairman import Chairman
from forge_data.order.nested import Nested

LONGEST_TABLE = 2**20
"""The longest period that is kept as a table."""


class Mixture(Protocol):
    """Draws of sources, in an order without end.

    Attributes:
        shares: draws of each source in a period, in whole numbers; 0 = never.
        period: their sum.
    """

    shares: tuple[int, ...]
    period: int

    @property
    def bound(self) -> Fraction:
        """No count of draws ever differs by more from its share, in samples."""
        ...

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, number of the draw within that source) of each sample, int64."""
        ...

    def draws(self, samples: int) -> list[int]:
        """Draws of each source among the first `samples` samples."""
        ...

    def sample_of(self, source: int, draw: int) -> int:
        """The sample that is draw number `draw` (from 0) of `source`."""
        ...


def mixture_of(shares: Sequence[int]) -> Mixture:
    """The mixture of sources in the ratio of `shares`, whole numbers from 0 without a common factor, one above 0."""
    return Chairman(shares) if sum(shares) <= LONGEST_TABLE else Nested(shares)
