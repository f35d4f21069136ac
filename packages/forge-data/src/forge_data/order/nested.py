"""A mixture without a table: a tree of exact two-way splits, for weights whose period is too long.

The sources are the leaves of a Huffman tree (Huffman, 1952) over their weights. Among the first m draws of an inner node
of weight W, its child of weight a <= W / 2 was drawn

    L(m) = floor(m a / W + 1/2)

times and the other one m - L(m) times: the ordered merge of draws at the virtual times (l + 1/2) / weight. Both counts
are within 1/2 of their shares of m. L has a closed form, and so has its inverse: draw l of that child is draw
((2 l + 1) W - 1) // 2a of the node, draw l of the other one, of weight b, draw (2 l + 1) W // 2b. So a sample is found by
one step down per level, fewer than the entropy of the shares + 1 on average, and nothing is stored or rounded.

How far counts are from their shares: a node's deviation is 1/2 for its own split and, of its parent's, its share of it.
With v_0 the leaf, v_1 its parent and so on to the root v_d, whose deviation is 0, that of leaf i is at most

    1/2 (w_i / W(v_0) + w_i / W(v_1) + ... + w_i / W(v_{d-1})),

at any sample, so it never grows. When Huffman's rule made v_{j+1} out of v_j and another node, everything left weighed
at least as much as v_j; hence W(v_{j+2}) >= W(v_{j+1}) + W(v_j). The weights on the way up are at least Fibonacci
numbers of w_i, and the sum is below 1/2 (1 + 1 + 1/2 + 1/3 + 1/5 + 1/8 + ...) < 1.68, for any number of sources
with any weights. For two sources it is 1/2, for three below 1.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heapify, heappop, heappush

import numpy as np

_WINDOW = 16_384
"""Samples that are found together; a loader asks for as many."""
_WORD = 32
_MASK = (1 << _WORD) - 1


@dataclass(frozen=True)
class _Split:
    """An inner node: which children it has, and their weights `few` <= `many`."""

    children: tuple[int, int]
    few: int
    many: int

    @property
    def weight(self) -> int:
        return self.few + self.many

    def counted(self, draws: int) -> int:
        """How many of the first `draws` draws the first child made."""
        return (2 * draws * self.few + self.weight) // (2 * self.weight)

    def draw_of(self, child: int, draw: int) -> int:
        """The draw of this node that is draw number `draw` of a child."""
        if child == self.children[0]:
            return ((2 * draw + 1) * self.weight - 1) // (2 * self.few)
        return (2 * draw + 1) * self.weight // (2 * self.many)


class Nested:
    """Source and per-source number of every sample, in exact integers; any weights, any sample below 2^63.

    Attributes:
        shares: exact weights of the sources in whole numbers; 0 = never.
        period: their sum; after so many samples each source was drawn exactly its share.
    """

    def __init__(self, shares: Sequence[int]) -> None:
        """`shares` are whole numbers from 0, one of them above it."""
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
        """No count of draws ever differs by more from its share, in samples."""
        return max(
            sum((Fraction(share, 2 * self._weights[node]) for node in self._upwards(source)), Fraction(0))
            for source, share in enumerate(self.shares)
            if share
        )

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, number of the draw within that source) of each sample, int64; fast where samples are neighbors."""
        samples = np.asarray(samples, dtype=np.int64)
        if not len(samples):
            return samples.copy(), samples.copy()
        first, last = int(samples.min()), int(samples.max())
        if last - first < _WINDOW:
            found, numbers = self._window(first, last + 1 - first)
            return found[samples - first], numbers[samples - first]
        sources, draws = np.empty_like(samples), np.empty_like(samples)
        windows = (samples - first) // _WINDOW
        for window in np.unique(windows).tolist():
            own = np.flatnonzero(windows == window)
            sources[own], draws[own] = self.locate(samples[own])
        return sources, draws

    def draws(self, samples: int) -> list[int]:
        """Draws of each source among the first `samples` samples."""
        counts = {self._root: samples}
        for node, split in reversed(self._splits.items()):
            counts[split.children[0]] = few = split.counted(counts[node])
            counts[split.children[1]] = counts[node] - few
        return [counts.get(source, 0) for source in range(len(self.shares))]

    def sample_of(self, source: int, draw: int) -> int:
        """The sample that is draw number `draw` (from 0) of `source`."""
        node = source
        while node != self._root:
            parent = self._parents[node]
            node, draw = parent, self._splits[parent].draw_of(node, draw)
        return draw

    def _upwards(self, node: int) -> Iterator[int]:
        """The node and its ancestors, without the root."""
        while node != self._root:
            yield node
            node = self._parents[node]

    def _window(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(sources, numbers of draws), each (count,) int64, of samples [first, first + count): one split after the other."""
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
    """(count,) int64: floor((start + j step) / divisor) for j = 0, 1, ..., exactly; every result below 2^31.

    Both summands are taken in units of 2^-b of the divisor, rounded up (Granlund and Montgomery, 1994). That adds less
    than (j + 1) 2^-b, and a fraction is 1 / divisor at least below the next whole number, so where 2^b >= count * divisor
    the floor is that of the exact value. b is a multiple of 32: products are those of words of 32 bits in uint64.
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
