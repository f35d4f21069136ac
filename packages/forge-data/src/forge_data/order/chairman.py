"""A mixture whose period fits a table: the chairman assignment problem, solved for one period and repeated.

After any number n of samples, source i of k with share s_i was drawn n s_i times, give or take at most 1 - 1/(2k - 2)
(Tijdeman, 1980). After one period of P samples every source was drawn exactly its share, so the table repeats and the
draws before any sample are arithmetic.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from heapq import heapify, heappop, heappush
from itertools import islice

import numpy as np

_CHUNK = 16_384
"""Entries that the table grows by at least."""


class Chairman:
    """Source and per-source number of every sample, by arithmetic over one period.

    The table grows as far as samples are asked for, about a microsecond and 24 bytes an entry: 25 MB for 2^20 of them.

    Attributes:
        shares: draws of each source in one period; 0 = never.
        period: their sum.
        bound: no count of draws ever differs by more from its share, in samples.
    """

    def __init__(self, shares: Sequence[int]) -> None:
        """`shares` are whole numbers from 0, one of them above it."""
        self.shares = tuple(shares)
        self.period = sum(self.shares)
        count = sum(share > 0 for share in self.shares)
        self.bound = 1 - Fraction(1, 2 * count - 2) if count > 1 else Fraction(0)
        self._shares = np.array(self.shares, dtype=np.int64)
        self._coming = _assign(self.shares)
        self._built = 0
        # Memory that nothing was written to costs nothing.
        self._table = np.empty(self.period, dtype=np.int64)
        self._before = np.empty(self.period, dtype=np.int64)
        self._places = [np.empty(share, dtype=np.int64) for share in self.shares]
        self._drawn = [0] * len(self.shares)

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, number of the draw within that source) of each sample, int64."""
        periods, places = np.divmod(np.asarray(samples, dtype=np.int64), self.period)
        if self._built < self.period and places.size:
            self._build(int(places.max()) + 1)
        sources = self._table[places]
        return sources, periods * self._shares[sources] + self._before[places]

    def draws(self, samples: int) -> list[int]:
        """Draws of each source among the first `samples` samples."""
        periods, rest = divmod(samples, self.period)
        self._build(rest)
        known = zip(self.shares, self._places, self._drawn, strict=True)
        return [periods * share + int(np.searchsorted(places[:drawn], rest)) for share, places, drawn in known]

    def sample_of(self, source: int, draw: int) -> int:
        """The sample that is draw number `draw` (from 0) of `source`."""
        periods, rest = divmod(draw, self.shares[source])
        # Before that many samples a source is due two draws more than `rest`, and it is never two behind.
        self._build(-(-(rest + 2) * self.period // self.shares[source]))
        return periods * self.period + int(self._places[source][rest])

    def _build(self, samples: int) -> None:
        """Fills the table for the first `samples` samples of a period, or all of it when there are fewer."""
        if samples <= self._built or self._built == self.period:
            return
        first = self._built
        last = min(self.period, max(samples, first + _CHUNK))
        new = np.fromiter(islice(self._coming, last - first), dtype=np.int64, count=last - first)
        self._table[first:last] = new
        for source in np.unique(new).tolist():
            places = np.flatnonzero(new == source) + first
            drawn = self._drawn[source]
            self._drawn[source] = drawn + len(places)
            self._places[source][drawn : drawn + len(places)] = places
            self._before[places] = np.arange(drawn, drawn + len(places))
        self._built = last


def _assign(shares: Sequence[int]) -> Iterator[int]:
    """The source of each sample, in order.

    Draw c of source i (both from 0) with share n_i may happen from sample t on, t counting from 1, where
    t n_i - c P >= P / (2k - 2), and must happen until that is >= P (1 - 1 / (2k - 2)). Among the draws that may happen
    the one whose deadline comes first does.
    """
    drawn_from = [source for source, share in enumerate(shares) if share]
    period, count = sum(shares), len(drawn_from)
    if count == 1:
        while True:
            yield drawn_from[0]
    scale = 2 * count - 2

    def draw(source: int, number: int) -> tuple[int, int, float, int, int]:
        """(first sample that may be it, last one that must be, the latter unrounded, source, number)."""
        share, drawn = shares[source] * scale, number * period * scale
        deadline = drawn + period * (scale - 1)
        return -(-(drawn + period) // share), -(-deadline // share), deadline / share, source, number

    waiting = [draw(source, 0) for source in drawn_from]
    heapify(waiting)
    ready: list[tuple[int, float, int, int]] = []
    sample = 0
    while True:
        sample += 1
        while waiting and waiting[0][0] <= sample:
            heappush(ready, heappop(waiting)[1:])
        _, _, source, number = heappop(ready)
        yield source
        heappush(waiting, draw(source, number + 1))
