"""Sample i of a run: which source, and which unit of it. A pure function of (recipe, seed, i)."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from forge_data.order.permutation import key_of, permute, permute_blocks
from forge_data.order.timeline import Timeline
from forge_data.section import Data

BLOCK = 16_384

Order = Callable[[np.ndarray, int, int, np.ndarray], np.ndarray]
"""(places in the epoch, rows, key, epochs) -> rows."""


def _as_stored(places: np.ndarray, size: int, key: int, epochs: np.ndarray) -> np.ndarray:  # noqa: ARG001 (an `Order`)
    return places


def order_of(data: Data) -> Order:
    """The order that a recipe chooses by `shuffle`."""
    if data.shuffle == "none":
        return _as_stored
    if data.shuffle == "block":
        return partial(permute_blocks, block=data.shuffle_block, window=data.shuffle_window)
    return permute


class Samples:
    """Finds samples by arithmetic; keeps the blocks that it found last, so that a step costs microseconds."""

    def __init__(self, timeline: Timeline, labels: Sequence[str], rows: Sequence[int | None], seed: int, order: Order) -> None:
        """
        Args:
            timeline: draws of the sources.
            labels: of the sources; with the seed they make the key of each order.
            rows: samples of each source in one epoch; None for a stream, which does not know.
            seed: of the order.
            order: of the samples of one epoch.
        """
        self.timeline = timeline
        self.rows = tuple(rows)
        self.order = order
        self._keys = [key_of("order of rows", seed, label) for label in labels]
        self._blocks: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def locate(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(sources, rows), each (count,) int64, of samples [first, first + count); a stream's rows count on over epochs."""
        parts = []
        for block in range(first // BLOCK, (first + count - 1) // BLOCK + 1):
            sources, rows = self._block(block)
            window = slice(max(0, first - block * BLOCK), first + count - block * BLOCK)
            parts.append((sources[window], rows[window]))
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([sources for sources, _ in parts]), np.concatenate([rows for _, rows in parts])

    def end(self, epochs: int) -> int | None:
        """Samples until some source would begin its epoch number `epochs` (from 0); None when that never happens."""
        known = [(source, rows) for source, rows in enumerate(self.rows) if rows is not None]
        ends = [self.timeline.sample_of(source, epochs * rows) for source, rows in known]
        return min((end for end in ends if end is not None), default=None)

    def _block(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        found = self._blocks.get(number)
        if found is None:
            while len(self._blocks) >= 2:
                del self._blocks[next(iter(self._blocks))]
            found = self._blocks[number] = self._find(np.arange(number * BLOCK, (number + 1) * BLOCK))
        return found

    def _find(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sources, draws = self.timeline.locate(samples)
        for source in np.unique(sources).tolist():
            size = self.rows[source]
            if size is None:
                continue
            own = np.flatnonzero(sources == source)
            epochs, places = np.divmod(draws[own], size)
            draws[own] = self.order(places, size, self._keys[source], epochs)
        return sources, draws
