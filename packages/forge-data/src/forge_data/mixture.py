"""Which source a sample comes from: weights become one period of a fixed, even assignment.

The assignment solves the chairman assignment problem (Tijdeman, 1980): after any number n of samples, source i of k
was drawn a number of times that differs from n * w_i by at most 1 - 1/(2k - 2). After one period of P samples, every
source was drawn exactly its share, so the assignment repeats and the draws before any sample are arithmetic.
"""

from collections.abc import Sequence
from fractions import Fraction
from heapq import heapify, heappop, heappush
from math import gcd, lcm

import numpy as np

from forge_core.errors import DataError

LONGEST_PERIOD = 65_536


def tempered(weights: Sequence[float], temperature: float) -> tuple[float, ...]:
    """weight ** (1 / temperature); 0 stays 0 at any temperature, and at 1 weights stay as they are written."""
    if temperature == 1:
        return tuple(weights)
    largest = max(weights, default=0)
    return tuple((weight / largest) ** (1 / temperature) if weight else 0.0 for weight in weights)


def shares_of(weights: Sequence[float], longest: int = LONGEST_PERIOD) -> tuple[int, ...]:
    """Integer draws of each source in one period, in the ratio of `weights` as they are written in decimal.

    Ratios whose period would exceed `longest` are rounded to it, at least one draw for a weight above 0.

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
    return tuple(shares) if sum(shares) <= longest else _rounded([fraction / total for fraction in exact], longest)


def _rounded(weights: Sequence[Fraction], longest: int) -> tuple[int, ...]:
    """Shares of `longest` by largest remainder."""
    shares = [max(1, int(weight * longest)) if weight else 0 for weight in weights]
    while (missing := longest - sum(shares)) != 0:
        gaps = [weight * longest - share if weight else Fraction(0) for weight, share in zip(weights, shares, strict=True)]
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

    def __init__(self, weights: Sequence[float], longest: int = LONGEST_PERIOD) -> None:
        self.shares = shares_of(weights, longest)
        self.period = sum(self.shares)
        self._table = _assign(self.shares)
        self._before = np.empty(self.period, dtype=np.int64)
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

    Draw c of source i (both from 0) with share n_i may happen from sample t on, t counting from 1, where
    t n_i - c P >= P / (2k - 2), and must happen until that is >= P (1 - 1 / (2k - 2)). Among the draws that may happen
    the one whose deadline comes first does.
    """
    drawn_from = [source for source, share in enumerate(shares) if share]
    period, count = sum(shares), len(drawn_from)
    if count == 1:
        return np.full(period, drawn_from[0], dtype=np.int64)
    scale = 2 * count - 2

    def draw(source: int, number: int) -> tuple[int, int, float, int, int]:
        """(first sample that may be it, last one that must be, the latter unrounded, source, number)."""
        share, drawn = shares[source] * scale, number * period * scale
        deadline = drawn + period * (scale - 1)
        return -(-(drawn + period) // share), -(-deadline // share), deadline / share, source, number

    waiting = [draw(source, 0) for source in drawn_from]
    heapify(waiting)
    ready: list[tuple[int, float, int, int]] = []
    table = np.empty(period, dtype=np.int64)
    for sample in range(1, period + 1):
        while waiting and waiting[0][0] <= sample:
            heappush(ready, heappop(waiting)[1:])
        _, _, source, number = heappop(ready)
        table[sample - 1] = source
        heappush(waiting, draw(source, number + 1))
    return table
