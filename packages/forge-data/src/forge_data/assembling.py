"""Rows to `Batch`: windows of tokens, labels, positions and documents."""

from collections.abc import Sequence

import numpy as np
import torch

from forge_core.batch import IGNORE, Batch
from forge_core.errors import DataError
from forge_data import labels as label_shift
from forge_data.buffers import Buffers
from forge_data.packing import Concatenated, Cut, places

_CHUNK = 1 << 17
"""Tokens that are worked on at a time, so that intermediate arrays stay in the cache."""


class Rows:
    """Model inputs of some rows, in reused memory: tokens and labels (N, T) int64, positions and documents int32."""

    def __init__(self, buffers: Buffers, count: int, length: int, masked: bool) -> None:
        shape = (count, length)
        self.tokens = buffers.take(shape, np.int64)
        self.labels = buffers.take(shape, np.int64)
        self.positions = buffers.take(shape, np.int32) if masked else None
        self.documents = buffers.take(shape, np.int32) if masked else None

    def fill(self, start: int, cut: Cut) -> None:
        """Writes rows [start, start + N) from N windows."""
        part = slice(start, start + len(cut.windows))
        label_shift.shift(cut.windows, cut.rows, cut.columns, self.tokens[part], self.labels[part])
        if self.positions is not None and self.documents is not None:
            places(cut, self.positions[part], self.documents[part])

    def clear(self, row: int) -> None:
        """Makes a row that trains nothing: no label, one document."""
        self.tokens[row] = 0
        self.labels[row] = IGNORE
        if self.positions is not None and self.documents is not None:
            self.positions[row] = np.arange(self.positions.shape[1])
            self.documents[row] = 0

    def batch(self, start: int, stop: int, samples: tuple[int, ...]) -> Batch:
        """Rows [start, stop) as a batch that shares their memory."""
        part = slice(start, stop)
        return Batch(
            tokens=torch.from_numpy(self.tokens[part]),
            labels=torch.from_numpy(self.labels[part]),
            positions=None if self.positions is None else torch.from_numpy(self.positions[part]),
            documents=None if self.documents is None else torch.from_numpy(self.documents[part]),
            samples=samples,
        )


class Assembler:
    """Cuts rows from several packings and fills model inputs with them."""

    def __init__(self, packings: Sequence[Concatenated], length: int, masked: bool, vocab_size: int | None) -> None:
        self.packings = packings
        self.length = length
        self.masked = masked
        self.vocab_size = vocab_size
        self._buffers = Buffers()
        self._chunk = max(1, _CHUNK // length)

    def rows(self, sources: np.ndarray, numbers: np.ndarray, count: int | None = None) -> Rows:
        """Model inputs of rows `numbers` (N,) of packings `sources` (N,), in this order; room for `count` rows."""
        found = Rows(self._buffers, len(numbers) if count is None else count, self.length, self.masked)
        for start in range(0, len(numbers), self._chunk):
            part = slice(start, start + self._chunk)
            found.fill(start, self._cut(sources[part], numbers[part]))
        return found

    def cut_last(self, source: int) -> tuple[Cut, int]:
        """The short last row of a packing; see `Concatenated.cut_last`."""
        packing = self.packings[source]
        cut, labelled = packing.cut_last()
        self._refuse_unknown(packing, np.array([packing.rows]), cut.windows)
        return cut, labelled

    def _cut(self, sources: np.ndarray, numbers: np.ndarray) -> Cut:
        first = int(sources[0])
        if len(self.packings) == 1 or (sources == first).all():
            return self._checked(first, numbers)
        cuts = []
        for source in np.unique(sources).tolist():
            own = np.flatnonzero(sources == source)
            cuts.append((own, self._checked(source, numbers[own])))
        return _joined(cuts, len(numbers), self.length)

    def _checked(self, source: int, numbers: np.ndarray) -> Cut:
        packing = self.packings[source]
        cut = packing.cut(numbers)
        self._refuse_unknown(packing, numbers, cut.windows)
        return cut

    def _refuse_unknown(self, packing: Concatenated, numbers: np.ndarray, windows: np.ndarray) -> None:
        """Reads every id of a source whose largest one is unknown; of the others it was compared when they were opened."""
        if packing.source.max_id is not None or self.vocab_size is None:
            return
        wrong = (windows >= self.vocab_size) | (windows < 0)
        if wrong.any():
            row, column = (int(place[0]) for place in np.nonzero(wrong))
            token = int(numbers[row]) * packing.length + column
            found = int(windows[row, column])
            raise DataError(
                f"{packing.source.name} at token {token}: id {found}, but the model's vocab_size is {self.vocab_size}"
            )


def _joined(cuts: list[tuple[np.ndarray, Cut]], count: int, length: int) -> Cut:
    """Windows of several sources brought into the order of their rows."""
    dtypes = {cut.windows.dtype for _, cut in cuts}
    windows = np.empty((count, length + 1), dtype=dtypes.pop() if len(dtypes) == 1 else np.dtype(np.int64))
    rows, columns = [], []
    for own, cut in cuts:
        windows[own] = cut.windows
        rows.append(own[cut.rows])
        columns.append(cut.columns)
    all_rows, all_columns = np.concatenate(rows), np.concatenate(columns)
    order = np.argsort(all_rows, kind="stable")
    return Cut(windows, all_rows[order], all_columns[order])
