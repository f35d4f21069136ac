"""Sample i of a run: which source, and which row of it. A pure function of (weights, rows, seed, i)."""

from collections.abc import Sequence

import numpy as np

from forge_data.mixture import Mixture
from forge_data.order import key_of, permute

BLOCK = 4096


class Samples:
    """Finds samples by arithmetic; keeps the blocks that it found last, so that a step costs microseconds."""

    def __init__(self, mixture: Mixture, labels: Sequence[str], rows: Sequence[int], seed: int, shuffle: bool) -> None:
        """
        Args:
            mixture: draws of the sources.
            labels: of the sources; with the seed they make the key of each order.
            rows: of each source, one epoch.
            seed: of the order.
            shuffle: False reads rows as they are stored.
        """
        self.mixture = mixture
        self.rows = tuple(rows)
        self.shuffle = shuffle
        self._keys = [key_of("order of rows", seed, label) for label in labels]
        self._blocks: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def locate(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(sources, rows), each (count,) int64, of samples [first, first + count)."""
        parts = []
        for block in range(first // BLOCK, (first + count - 1) // BLOCK + 1):
            sources, rows = self._block(block)
            window = slice(max(0, first - block * BLOCK), first + count - block * BLOCK)
            parts.append((sources[window], rows[window]))
        if len(parts) == 1:
            return parts[0]
        return np.concatenate([sources for sources, _ in parts]), np.concatenate([rows for _, rows in parts])

    def end(self, epochs: int) -> int:
        """Samples until some source would begin its epoch number `epochs` (from 0)."""
        shares = self.mixture.shares
        return min(self.mixture.sample_of(i, epochs * self.rows[i]) for i in range(len(shares)) if shares[i])

    def _block(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        found = self._blocks.get(number)
        if found is None:
            while len(self._blocks) >= 2:
                del self._blocks[next(iter(self._blocks))]
            found = self._blocks[number] = self._find(np.arange(number * BLOCK, (number + 1) * BLOCK))
        return found

    def _find(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sources, draws = self.mixture.locate(samples)
        rows = np.empty_like(draws)
        for source in np.unique(sources).tolist():
            own = np.flatnonzero(sources == source)
            epochs, places = np.divmod(draws[own], self.rows[source])
            rows[own] = permute(places, self.rows[source], self._keys[source], epochs) if self.shuffle else places
        return sources, rows
