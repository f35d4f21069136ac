"""Which source a sample comes from: weights become one period of a fixed, even assignment.

The assignment solves the chairman assignment problem (Tijdeman, 1980): after any number n of samples, source i of k
was drawn a number of times that differs from n * w_i by at most 1 - 1/(2k - 2). After one period of P samples, every
source was drawn exactly its share, so the assignment repeats and the draws before any sample are arithmetic.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm

import numpy as np

from forge_core.errors import DataError

LONGEST_PERIOD = 65_536


def shares_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Integer draws of each source in one period, in the ratio of `weights` as they are written in decimal.

    Ratios whose period would exceed `LONGEST_PERIOD` are rounded to it, at least one draw for a weight above 0.

    Raises:
        DataError: no weight is above 0, or one is negative or not finite.
    """
    if any(not 0 <= weight < float("inf") for weight in weights):
        raise DataError(f"weights of sources must be finite and not negative: {list(weights)}")
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    if not total:
        raise DataError("no source has a weight above 0; set the weight of at least one of [[data.sources]]")
    common = lcm(*(fraction.denominator for fraction in exact))
    shares = [int(fraction * common) for fraction in exact]
    divisor = gcd(*shares)
    shares = [share // divisor for share in shares]
    return tuple(shares) if sum(shares) <= LONGEST_PERIOD else _rounded([fraction / total for fraction in exact])


def _rounded(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Shares of LONGEST_PERIOD by largest remainder."""
    shares = [max(1, int(weight * LONGEST_PERIOD)) if weight else 0 for weight in weights]
    while (missing := LONGEST_PERIOD - sum(shares)) != 0:
        gaps = [weight * LONGEST_PERIOD - share if weight else Fraction(0) for weight, share in zip(weights, shares, strict=True)]
        if missing > 0:
            shares[max(range(len(gaps)), key=lambda i: gaps[i])] += 1
        else:
            shares[min((i for i in range(len(gaps)) if shares[i] > 1), key=lambda i: gaps[i])] -= 1
    return tuple(shares)


class Mixture:
    """Source and per-source number of every sample, by arithmetic over one period.

    Attributes:
        shares: draws of each source in one period; 0 = never.
        period: their sum.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.shares = shares_of(weights)
        self.period = sum(self.shares)
        self._table = _assign(self.shares)
        self._before = np.zeros(self.period, dtype=np.int64)
        self._places = [np.flatnonzero(self._table == source) for source in range(len(self.shares))]
        for places in self._places:
            self._before[places] = np.arange(len(places))
        self._shares = np.array(self.shares, dtype=np.int64)

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, number of the draw within that source) of each sample, int64."""
        periods, places = np.divmod(np.asarray(samples, dtype=np.int64), self.period)
        sources = self._table[places]
        return sources, periods * self._shares[sources] + self._before[places]

    def draws(self, samples: int) -> list[int]:
        """Draws of each source among the first `samples` samples."""
        periods, rest = divmod(samples, self.period)
        return [
            periods * share + int(np.searchsorted(places, rest)) for share, places in zip(self.shares, self._places, strict=True)
        ]

    def sample_of(self, source: int, draw: int) -> int:
        """The sample that is draw number `draw` (from 0) of `source`."""
        periods, rest = divmod(draw, self.shares[source])
        return periods * self.period + int(self._places[source][rest])


def _assign(shares: Sequence[int]) -> np.ndarray:
    """(P,) int64 source of each sample of one period.

    Among the sources that are far enough behind (n w - drawn >= 1/(2k-2)) the one whose deadline comes first; all in
    integers scaled by P (2k - 2), except the last quotient, whose distinct values fp64 keeps apart.
    """
    drawn_from = np.flatnonzero(np.array(shares))
    own, period, count = np.array(shares, dtype=np.int64)[drawn_from], sum(shares), len(drawn_from)
    table = np.full(period, drawn_from[0], dtype=np.int64)
    if count == 1:
        return table
    scale = 2 * count - 2
    behind = np.zeros(count, dtype=np.int64)
    for number in range(period):
        behind += own
        late = np.flatnonzero(behind * scale >= period)
        deadline = (period * (scale - 1) - behind[late] * scale) / own[late]
        chosen = late[np.argmin(deadline)]
        behind[chosen] -= period
        table[number] = drawn_from[chosen]
    return table
