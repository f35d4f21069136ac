"""Assigns samples to sources in exact shares; the source of any sample is computed directly.

Shares are whole numbers of draws in a period of any length (`phases.shares_of`); nothing is rounded. For a short period, a
table keeps the count of every source within one sample of its share (`TableMixture`). For a long one, a tree of two-way splits
keeps it within 1.68 samples (`TreeMixture`). Neither deviation grows with the number of samples. Over a ramp of weights,
`ramp_draws` keeps counts less than one sample ahead and at most 1/2 + 1/3 + ... + 1/k behind.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heapify, heappop, heappush
from itertools import islice
from math import floor
from typing import Protocol

import numpy as np

LONGEST_TABLE = 2**20
"""The longest period that is stored as a table."""
_CHUNK = 16_384
"""Minimum number of entries by which the table grows."""
_WINDOW = 16_384
"""Number of samples computed together; equals the block of `loading.sample_order`."""
_WORD = 32
_MASK = (1 << _WORD) - 1


class Mixture(Protocol):
    """An endless sequence of draws of sources.

    Attributes:
        shares: draws of each source per period, whole numbers; 0 = never.
        period: sum of the shares.
    """

    shares: tuple[int, ...]
    period: int

    @property
    def bound(self) -> Fraction:
        """Largest deviation, in samples, of the number of draws of a source from its share."""
        ...

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (source, number of the draw within that source) of each sample, int64."""
        ...

    def draws(self, samples: int) -> list[int]:
        """Returns the number of draws of each source among the first `samples` samples."""
        ...

    def sample_of(self, source: int, draw: int) -> int:
        """Returns the sample that is draw number `draw` (from 0) of `source`."""
        ...


def mixture_of(shares: Sequence[int]) -> Mixture:
    """Returns the mixture for `shares`: whole numbers without a common factor, at least one above 0."""
    return TableMixture(shares) if sum(shares) <= LONGEST_TABLE else TreeMixture(shares)


class TableMixture:
    """A mixture with a table of one period: the chairman assignment problem, solved for one period and repeated.

    After any number n of samples, the number of draws of source i of k with share s_i differs from n s_i by at most
    1 - 1/(2k - 2) (Tijdeman, 1980). After one period of P samples, every source was drawn exactly by its share. So the table
    repeats, and the number of draws before any sample is computed directly.

    The table grows as samples are requested, at about a microsecond and 24 bytes per entry: 25 MB for 2^20 entries.

    Attributes:
        shares: draws of each source per period; 0 = never.
        period: sum of the shares.
        bound: largest deviation, in samples, of the number of draws of a source from its share.
    """

    def __init__(self, shares: Sequence[int]) -> None:
        """
        Args:
            shares: whole numbers, at least one above 0.
        """
        self.shares = tuple(shares)
        self.period = sum(self.shares)
        count = sum(share > 0 for share in self.shares)
        self.bound = 1 - Fraction(1, 2 * count - 2) if count > 1 else Fraction(0)
        self._shares = np.array(self.shares, dtype=np.int64)
        self._coming = _assign(self.shares)
        self._built = 0
        # Unwritten memory is not allocated by the system.
        self._table = np.empty(self.period, dtype=np.int64)
        self._before = np.empty(self.period, dtype=np.int64)
        self._places = [np.empty(share, dtype=np.int64) for share in self.shares]
        self._drawn = [0] * len(self.shares)

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (source, number of the draw within that source) of each sample, int64."""
        periods, places = np.divmod(np.asarray(samples, dtype=np.int64), self.period)
        if self._built < self.period and places.size:
            self._build(int(places.max()) + 1)
        sources = self._table[places]
        return sources, periods * self._shares[sources] + self._before[places]

    def draws(self, samples: int) -> list[int]:
        """Returns the number of draws of each source among the first `samples` samples."""
        periods, rest = divmod(samples, self.period)
        self._build(rest)
        known = zip(self.shares, self._places, self._drawn, strict=True)
        return [periods * share + int(np.searchsorted(places[:drawn], rest)) for share, places, drawn in known]

    def sample_of(self, source: int, draw: int) -> int:
        """Returns the sample that is draw number `draw` (from 0) of `source`."""
        periods, rest = divmod(draw, self.shares[source])
        # After this many samples the share is `rest` + 2 draws, and a source is never two draws behind its share.
        self._build(-(-(rest + 2) * self.period // self.shares[source]))
        return periods * self.period + int(self._places[source][rest])

    def _build(self, samples: int) -> None:
        """Fills the table for at least the first `samples` samples of the period."""
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
    """Yields the source of each sample, in order.

    Draw c of source i (both from 0) with share n_i is allowed from the first sample t (from 1) on with
    t n_i - c P >= P / (2k - 2), and required by the first t with t n_i - c P >= P (1 - 1 / (2k - 2)). Among the allowed
    draws, the one with the earliest deadline is taken.
    """
    drawn_from = [source for source, share in enumerate(shares) if share]
    period, count = sum(shares), len(drawn_from)
    if count == 1:
        while True:
            yield drawn_from[0]
    scale = 2 * count - 2

    def draw(source: int, number: int) -> tuple[int, int, float, int, int]:
        """Returns (first allowed sample, deadline, unrounded deadline, source, number)."""
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


@dataclass(frozen=True)
class _Split:
    """An inner node: its children, and their weights `few` <= `many`."""

    children: tuple[int, int]
    few: int
    many: int

    @property
    def weight(self) -> int:
        return self.few + self.many

    def counted(self, draws: int) -> int:
        """Returns how many of the first `draws` draws belong to the first child."""
        return (2 * draws * self.few + self.weight) // (2 * self.weight)

    def draw_of(self, child: int, draw: int) -> int:
        """Returns the draw of this node that is draw number `draw` of a child."""
        if child == self.children[0]:
            return ((2 * draw + 1) * self.weight - 1) // (2 * self.few)
        return (2 * draw + 1) * self.weight // (2 * self.many)


class TreeMixture:
    """A mixture without a table: a tree of exact two-way splits, for any weights and any sample below 2^63.

    The sources are the leaves of a Huffman tree (Huffman, 1952) over their weights. Among the first m draws of an inner node
    of weight W, its child of weight a <= W / 2 was drawn

        L(m) = floor(m a / W + 1/2)

    times and the other one m - L(m) times: the ordered merge of draws at the virtual times (l + 1/2) / weight. Both counts
    are within 1/2 of their shares of m. L and its inverse have closed forms: draw l of this child is draw
    ((2 l + 1) W - 1) // 2a of the node; draw l of the other child, of weight b, is draw (2 l + 1) W // 2b. So a sample is found
    in one step per level, on average fewer than the entropy of the shares + 1, and nothing is stored or rounded.

    Deviation of the counts from their shares: a node has the deviation of its own split, 1/2, plus its share of its parent's
    deviation. With v_0 the leaf, v_1 its parent and so on to the root v_d, whose deviation is 0, the deviation of leaf i is at
    most

        1/2 (w_i / W(v_0) + w_i / W(v_1) + ... + w_i / W(v_{d-1})),

    at any sample, so it never grows. When Huffman's rule joins v_j and another node to v_{j+1}, every remaining node weighs
    at least as much as v_j; hence W(v_{j+2}) >= W(v_{j+1}) + W(v_j). The weights towards the root are at least w_i times the
    Fibonacci numbers, and the sum is below 1/2 (1 + 1 + 1/2 + 1/3 + 1/5 + 1/8 + ...) < 1.68, for any number of sources
    with any weights. For two sources it is 1/2, for three below 1.

    Attributes:
        shares: exact weights of the sources as whole numbers; 0 = never.
        period: sum of the shares; after this many samples, each source was drawn exactly by its share.
    """

    def __init__(self, shares: Sequence[int]) -> None:
        """
        Args:
            shares: whole numbers, at least one above 0.
        """
        self.shares = tuple(shares)
        self.period = sum(self.shares)
        self._splits: dict[int, _Split] = {}
        self._parents: dict[int, int] = {}
        open_nodes = [(share, source) for source, share in enumerate(self.shares) if share]
        weights = {source: share for share, source in open_nodes}
        heapify(open_nodes)
        while len(open_nodes) > 1:
            (few, first), (many, second) = heappop(open_nodes), heappop(open_nodes)
            node = len(self.shares) + len(self._splits)
            self._splits[node] = _Split((first, second), few, many)
            self._parents[first] = self._parents[second] = node
            weights[node] = few + many
            heappush(open_nodes, (few + many, node))
        self._root, self._weights = open_nodes[0][1], weights

    @property
    def bound(self) -> Fraction:
        """Largest deviation, in samples, of the number of draws of a source from its share."""
        return max(
            sum((Fraction(share, 2 * self._weights[node]) for node in self._upwards(source)), Fraction(0))
            for source, share in enumerate(self.shares)
            if share
        )

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (source, number of the draw within that source) of each sample, int64; fast for neighboring samples."""
        samples = np.asarray(samples, dtype=np.int64)
        if not len(samples):
            return samples.copy(), samples.copy()
        first, last = int(samples.min()), int(samples.max())
        if last - first < _WINDOW:
            window_sources, window_draws = self._window(first, last + 1 - first)
            return window_sources[samples - first], window_draws[samples - first]
        sources, draws = np.empty_like(samples), np.empty_like(samples)
        windows = (samples - first) // _WINDOW
        for window in np.unique(windows).tolist():
            own = np.flatnonzero(windows == window)
            sources[own], draws[own] = self.locate(samples[own])
        return sources, draws

    def draws(self, samples: int) -> list[int]:
        """Returns the number of draws of each source among the first `samples` samples."""
        counts = {self._root: samples}
        for node, split in reversed(self._splits.items()):
            counts[split.children[0]] = few = split.counted(counts[node])
            counts[split.children[1]] = counts[node] - few
        return [counts.get(source, 0) for source in range(len(self.shares))]

    def sample_of(self, source: int, draw: int) -> int:
        """Returns the sample that is draw number `draw` (from 0) of `source`."""
        node = source
        while node != self._root:
            parent = self._parents[node]
            node, draw = parent, self._splits[parent].draw_of(node, draw)
        return draw

    def _upwards(self, node: int) -> Iterator[int]:
        """Yields the node and its ancestors, without the root."""
        while node != self._root:
            yield node
            node = self._parents[node]

    def _window(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (sources, draw numbers), each (count,) int64, of samples [first, first + count), split by split."""
        sources, draws = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
        left = [(self._root, first, np.arange(count))]
        while left:
            node, first, places = left.pop()
            if node not in self._splits:
                sources[places] = node
                draws[places] = np.arange(first, first + len(places))
                continue
            split = self._splits[node]
            (few, many), before = split.children, split.counted(first)
            drawn = split.counted(first + len(places)) - before
            start = (2 * before + 1) * split.weight - 1 - 2 * split.few * first
            own = floors(start, 2 * split.weight, 2 * split.few, drawn)
            others = np.ones(len(places), dtype=bool)
            others[own] = False
            left.append((few, before, places[own]))
            left.append((many, first - before, places[np.flatnonzero(others)]))
        return sources, draws


def floors(start: int, step: int, divisor: int, count: int) -> np.ndarray:
    """Returns (count,) int64 floor((start + j step) / divisor) for j = 0, 1, ..., exactly; every result is below 2^31.

    start / divisor and step / divisor are rounded up to multiples of 2^-b (Granlund and Montgomery, 1994). The error is less
    than (j + 1) 2^-b, and the exact value is at least 1 / divisor below the next whole number. So for 2^b >= count * divisor
    the floor is exact. b is a multiple of 32, so products are computed from 32-bit words in uint64.
    """
    if not count:
        return np.empty(0, dtype=np.int64)
    words = -(-(divisor.bit_length() + count.bit_length()) // _WORD)
    fraction = words * _WORD
    start = -(-(start << fraction) // divisor)
    step = -(-(step << fraction) // divisor) if count > 1 else 0
    places = np.arange(count, dtype=np.uint64)
    carry = np.zeros(count, dtype=np.uint64)
    for word in range(words):
        carry += places * np.uint64(step >> word * _WORD & _MASK)
        carry += np.uint64(start >> word * _WORD & _MASK)
        carry >>= np.uint64(_WORD)
    return (carry + places * np.uint64(step >> fraction) + np.uint64(start >> fraction)).astype(np.int64)


def ramp_draws(owed: Sequence[Fraction], samples: int) -> list[int]:
    """Returns the number of samples of each source in one stretch of a ramp, such that errors do not accumulate.

    A source is owed its exact share of the stretch plus its debt from earlier stretches; whole samples go, one after the
    other, to the source that is owed most. Then, at the end of every stretch, each of k sources is less than one sample ahead
    of its exact share and at most 1/2 + 1/3 + ... + 1/k behind.

    Ahead: before a sample is assigned, the debts sum to at least 1, so the largest is above 0. Behind: let D_j be the sum of
    the j largest debts after a stretch; D_k = 0, because the sources together are owed exactly the samples of the stretch. We
    show D_j <= j (1/(j+1) + ... + 1/k), downwards from j = k. If only those j sources got samples in the stretch, they got all
    of them, so the sum of their debts did not grow. Otherwise another source got a sample while it was owed at least as much
    as each of the j, so afterwards it is owed at least D_j / j - 1, and D_{j+1} >= D_j + D_j / j - 1, from which the claim
    follows. j = 1 is the bound.

    Args:
        owed: exact number of samples owed to each source; the sum is `samples`.
        samples: samples of the stretch.
    """
    counts = [max(0, floor(debt)) for debt in owed]
    while sum(counts) < samples:
        counts[max(range(len(owed)), key=lambda i: owed[i] - counts[i])] += 1
    while sum(counts) > samples:
        counts[min((i for i in range(len(owed)) if counts[i]), key=lambda i: owed[i] - counts[i])] -= 1
    return counts
