"""Model inputs of some rows in one piece of memory, and the batches that are cut from it."""

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from forge_core.batch import IGNORE, PADDING, Batch, Sources
from forge_data.loading.buffers import Buffers
from forge_data.loading.spec import Marks
from forge_data.packing.concatenate import RowWindows, places
from forge_data.packing.labels import shift

if TYPE_CHECKING:
    from torch import Tensor

    Parts = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


_BYTES = {"documents": 24, "mask": 17, "none": 16}
"""Of memory for a token."""


class Rows:
    """Tokens and labels (N, T) int64, by their marks also positions and documents (N, T) int32, or a token mask (N, T) bool.

    They lie behind each other in one array of bytes, which may be shared between processes.
    """

    def __init__(self, memory: np.ndarray, count: int, length: int, marks: Marks) -> None:
        """`memory` has at least `size_of(count, length, marks)` bytes, uint8."""
        shape, size = (count, length), count * length
        self.tokens = memory[: 8 * size].view(np.int64).reshape(shape)
        self.labels = memory[8 * size : 16 * size].view(np.int64).reshape(shape)
        told = marks == "documents"
        self.positions = memory[16 * size : 20 * size].view(np.int32).reshape(shape) if told else None
        self.documents = memory[20 * size : 24 * size].view(np.int32).reshape(shape) if told else None
        self.token_mask = memory[16 * size : 17 * size].view(np.bool_).reshape(shape) if marks == "mask" else None

    @staticmethod
    def size_of(count: int, length: int, marks: Marks) -> int:
        """Bytes of memory."""
        return count * length * _BYTES[marks]

    @classmethod
    def take(cls, buffers: Buffers, count: int, length: int, marks: Marks) -> "Rows":
        """Rows in memory that is free."""
        return cls(buffers.take((cls.size_of(count, length, marks),), np.uint8), count, length, marks)

    def fill(self, at: np.ndarray, cut: RowWindows) -> None:
        """Writes rows `at` (N,) int64 from N windows."""
        shift(cut.windows, cut.rows, cut.columns, self.tokens, self.labels, at)
        if cut.learned is not None:
            self.labels[at] = np.where(cut.learned[:, 1:], self.labels[at], IGNORE)
        if self.positions is not None and self.documents is not None:
            self.positions[at], self.documents[at] = places(cut)
        if self.token_mask is not None:
            self.token_mask[at] = True
        if cut.filled is not None:
            for row in np.flatnonzero(cut.filled < self.labels.shape[1]).tolist():
                self.pad(int(at[row]), int(cut.filled[row]))

    def pad(self, row: int, column: int) -> None:
        """Marks a row as padding from a column on; the last token before it has no label either."""
        self.tokens[row, column:] = 0
        self.labels[row, max(column - 1, 0) :] = IGNORE
        if self.positions is not None and self.documents is not None:
            self.positions[row, column:] = np.arange(self.positions.shape[1] - column)
            self.documents[row, column:] = PADDING
        if self.token_mask is not None:
            self.token_mask[row, :column] = True
            self.token_mask[row, column:] = False

    def batches(
        self, micro_batch: int, first: int, pin: bool = False, sources: "tuple[tuple[str, ...], np.ndarray] | None" = None
    ) -> list[Batch]:
        """Batches of `micro_batch` rows that share the rows' memory; row i is sample `first` + i.

        With `pin`, in page-locked memory of torch's own allocator instead, which waits for copies to the device before it
        gives memory out again; the rows' memory is free at once. Then batches also tell where documents start, which kernels
        of a GPU need to know. `sources` are the names of all, and the number of each row's.
        """
        parts = self.tensors(pin)
        names, origins = (sources[0], _tensor(sources[1].copy(), pin)) if sources else ((), None)
        found = []
        for start in range(0, len(self.tokens), micro_batch):
            stop = start + micro_batch
            batch = self.batch(start, stop, tuple(range(first + start, first + stop)), parts, pin)
            found.append(batch if origins is None else replace(batch, sources=Sources(names, origins[start:stop])))
        return found

    def tensors(self, pin: bool = False) -> "Parts":
        """(tokens, labels, positions, documents, token mask)."""
        marks = (None if array is None else _tensor(array, pin) for array in (self.positions, self.documents, self.token_mask))
        return _tensor(self.tokens, pin), _tensor(self.labels, pin), *marks  # type: ignore[return-value]

    def batch(
        self,
        start: int,
        stop: int,
        samples: tuple[int, ...],
        parts: "Parts | None" = None,
        pin: bool = False,
    ) -> Batch:
        """Rows [start, stop) as a batch; `parts` are the rows' `tensors`. `pin` as for `batches`."""
        tokens, labels, positions, documents, token_mask = parts or self.tensors(pin)
        full = self.token_mask is None or bool(self.token_mask[start:stop].all())
        batch = Batch(
            tokens=tokens[start:stop],
            labels=labels[start:stop],
            positions=None if positions is None else positions[start:stop],
            documents=None if documents is None else documents[start:stop],
            samples=samples,
            token_mask=None if token_mask is None or full else token_mask[start:stop],
        )
        return _with_pinned_starts(batch) if pin else batch


def _with_pinned_starts(batch: Batch) -> Batch:
    starts = batch.with_document_starts().document_starts
    return batch if starts is None else replace(batch, document_starts=starts.pin_memory())


def _tensor(array: np.ndarray, pin: bool) -> "Tensor":
    import torch

    shared = torch.from_numpy(array)
    return shared.pin_memory() if pin else shared
