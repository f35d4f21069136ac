"""Builds the rows of any step: windows of tokens from the packings of the sources, as model inputs in one block of memory.

From the bottom up: `shift` computes labels of a window, `TokenRows` holds model inputs and slices them into batches, an
`Assembler` fills rows from several packings, and a `RowReader` fills the rows of any step. torch is imported only to build a
batch.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_core.batch import IGNORE, PADDING, Batch, Sources
from forge_core.errors import DataError
from forge_data.loading.sample_order import SampleOrder, intervals_for
from forge_data.loading.sources import LoadSpec, Marks, OpenedSources, open_packings
from forge_data.packing.concatenation import ConcatenatedPacking, Packing, RowWindows, places
from forge_data.packing.readers import Position, StreamPacking
from forge_data.sources.scan import place_of

_BYTES = {"documents": 24, "mask": 17, "none": 16}
"""Bytes of memory per token."""
_CHUNK = 1 << 17
"""Tokens processed at a time, so that intermediate arrays stay in the CPU cache."""


def shift(
    windows: np.ndarray, rows: np.ndarray, columns: np.ndarray, tokens: np.ndarray, labels: np.ndarray, at: np.ndarray
) -> None:
    """Writes model inputs and labels of a set of windows. Forge shifts labels only here.

    The label of position t is the token at t + 1. No label crosses a document border: the last token of a document has no
    label. If a document ends with an end-of-document token, that token is the label of the token before it, and has no label
    itself.

    Args:
        windows: (N, T + 1) token ids of any integer dtype: the tokens of each row and the token after them.
        rows, columns: (K,) int64, document ends inside the windows: token `columns - 1` of the window is the last of
            its document, 1 <= column <= T.
        tokens: (M, T) int64; rows `at` are written.
        labels: (M, T) int64; rows `at` are written, with `IGNORE` where there is no label.
        at: (N,) int64, the row of each window.

    Raises:
        DataError: ids are not integers; they would be rounded.
    """
    if windows.dtype.kind not in "ui":
        raise DataError(f"token ids must be integers, got {windows.dtype.name} from a source")
    tokens[at] = windows[:, :-1]
    labels[at] = windows[:, 1:]
    labels[at[rows], columns - 1] = IGNORE


class Buffers:
    """Reuses arrays once nothing else refers to them.

    Allocating memory takes longer than filling it. A tensor of `torch.from_numpy` refers to its array as long as any view of
    the tensor exists, so a batch that is still in use is never overwritten.
    """

    def __init__(self, make: Callable[[tuple[int, ...], Any], np.ndarray] = np.empty) -> None:
        """
        Args:
            make: returns a new array of a shape and dtype. The array must own its memory, or its owner must not be an array.
        """
        self._make = make
        self._arrays: list[np.ndarray] = []
        probe = [np.empty(0)]
        self._unused = _references(probe, 0)

    def take(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Returns an array with undefined content."""
        for index in range(len(self._arrays)):
            array = self._arrays[index]
            fits = array.shape == shape and array.dtype == dtype
            del array
            if fits and _references(self._arrays, index) == self._unused:
                return self._arrays[index]
        self._arrays.append(self._make(shape, dtype))
        return self._arrays[-1]

    def held(self) -> set[int]:
        """Returns the `id` of every array of this pool."""
        return {id(array) for array in self._arrays}

    def drop_others(self, shape: tuple[int, ...]) -> None:
        """Drops all arrays of other shapes."""
        self._arrays = [array for array in self._arrays if array.shape == shape]


def _references(arrays: list[np.ndarray], index: int) -> int:
    return sys.getrefcount(arrays[index])


class TokenRows:
    """Tokens and labels (N, T) int64; depending on the marks also positions and documents (N, T) int32, or a token mask
    (N, T) bool.

    They lie one after the other in one array of bytes, which may be shared between processes.
    """

    def __init__(self, memory: np.ndarray, count: int, length: int, marks: Marks) -> None:
        """
        Args:
            memory: (>= `size_of(count, length, marks)`,) uint8.
            count: N, number of rows.
            length: T, tokens per row.
            marks: which arrays the rows have.
        """
        shape, size = (count, length), count * length
        self.tokens = memory[: 8 * size].view(np.int64).reshape(shape)
        self.labels = memory[8 * size : 16 * size].view(np.int64).reshape(shape)
        with_documents = marks == "documents"
        self.positions = memory[16 * size : 20 * size].view(np.int32).reshape(shape) if with_documents else None
        self.documents = memory[20 * size : 24 * size].view(np.int32).reshape(shape) if with_documents else None
        self.token_mask = memory[16 * size : 17 * size].view(np.bool_).reshape(shape) if marks == "mask" else None

    @staticmethod
    def size_of(count: int, length: int, marks: Marks) -> int:
        """Returns the bytes of memory that rows need."""
        return count * length * _BYTES[marks]

    @classmethod
    def take(cls, buffers: Buffers, count: int, length: int, marks: Marks) -> "TokenRows":
        """Returns rows in memory of a pool."""
        return cls(buffers.take((cls.size_of(count, length, marks),), np.uint8), count, length, marks)

    def fill(self, at: np.ndarray, cut: RowWindows) -> None:
        """Writes rows `at` (N,) int64 from N windows. Labeled texts have their label at the last token of each, and no other."""
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
        if cut.classes is not None:
            self.labels[at] = IGNORE
            last = cut.columns - 1
            self.labels[at[cut.rows], last] = cut.classes[cut.rows, last].astype(np.int64) - 1

    def pad(self, row: int, column: int) -> None:
        """Marks a row as padding from a column on, and removes the label of the last token before it."""
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
        """Returns batches of `micro_batch` rows that share the memory of the rows; row i is sample `first` + i.

        Args:
            micro_batch: rows per batch.
            first: sample number of row 0.
            pin: copies the rows to page-locked memory of torch's allocator, which does not reuse memory before its copy to the
                device has finished; the rows' own memory can be reused immediately. These batches also have document starts,
                which GPU kernels need.
            sources: names of all sources, and the source number of each row.
        """
        parts = self.tensors(pin)
        names, origins = (sources[0], _tensor(sources[1].copy(), pin)) if sources else ((), None)
        batches = []
        for start in range(0, len(self.tokens), micro_batch):
            stop = start + micro_batch
            batch = self.batch(start, stop, tuple(range(first + start, first + stop)), parts, pin)
            batches.append(batch if origins is None else replace(batch, sources=Sources(names, origins[start:stop])))
        return batches

    def tensors(self, pin: bool = False) -> "Parts":
        """Returns the tensors (tokens, labels, positions, documents, token mask)."""
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
        """Returns rows [start, stop) as a batch; `parts` is the result of `tensors`, and `pin` is as for `batches`."""
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


class Assembler:
    """Cuts rows from several packings and fills model inputs with them."""

    def __init__(self, packings: Sequence[Packing | StreamPacking], spec: LoadSpec, length: int, pieces: int = 1) -> None:
        """
        Args:
            packings: packing of each source.
            spec: spec of the run; its `vocab_size` limits the token ids.
            length: T, tokens per row.
            pieces: rows per sample; streams are read in whole samples.
        """
        self.packings = packings
        self.length = length
        self._pieces = pieces
        self._limits = [_id_limit(packing, spec.vocab_size) for packing in packings]

    def fill(self, rows: TokenRows, at: int, sources: np.ndarray, numbers: np.ndarray) -> None:
        """Writes rows `numbers` (N,) of packings `sources` (N,), in this order, from row `at` on."""
        for source in range(len(self.packings)):
            own = np.flatnonzero(sources == source)
            # Chunks of about equal size, because a short last chunk has the same fixed cost as a full one.
            chunks = max(1, round(len(own) * self.length / _CHUNK))
            size = max(1, -(-len(own) // (chunks * self._pieces))) * self._pieces
            for start in range(0, len(own), size):
                part = own[start : start + size]
                rows.fill(at + part, self._cut(source, numbers[part]))

    def cut_last(self, source: int) -> tuple[RowWindows, int]:
        """Returns the short last row of a packing; see `Packing.cut_last`."""
        packing = self.packings[source]
        assert not isinstance(packing, StreamPacking), "a stream has no last row"
        cut, labeled = packing.cut_last()
        self._refuse_unknown(source, np.array([packing.rows]), cut.windows)
        return cut, labeled

    def _cut(self, source: int, numbers: np.ndarray) -> RowWindows:
        packing = self.packings[source]
        cut = packing.cut(numbers, self.length) if isinstance(packing, StreamPacking) else packing.cut(numbers)
        _refuse_borders(packing, numbers, cut)
        self._refuse_unknown(source, numbers, cut.windows)
        return cut

    def _refuse_unknown(self, source: int, numbers: np.ndarray, windows: np.ndarray) -> None:
        """Checks every id that is read, because a file may have changed since it was opened."""
        if windows.dtype.kind not in "ui" or not windows.size:
            return  # the label shift refuses other dtypes
        packing, (limit, why) = self.packings[source], self._limits[source]
        # One pass: as unsigned numbers, negative ids are larger than any vocabulary.
        unsigned = windows if windows.dtype.kind == "u" else windows.view(windows.dtype.str.replace("i", "u"))
        if unsigned.max() < limit:
            return
        wrong = (windows >= limit) | (windows < 0)
        if wrong.any():
            row, column = (int(place[0]) for place in np.nonzero(wrong))
            token = int(windows[row, column])
            where = "" if isinstance(packing, StreamPacking) else _place_of_token(packing, int(numbers[row]), column)
            raise DataError(f"{packing.source.name}{where}: id {token}, but {why if token >= 0 else 'no id is negative'}")


def _id_limit(packing: Packing | StreamPacking, vocab_size: int | None) -> tuple[int, str]:
    """Returns (exclusive upper limit of the ids of a packing, its reason): the smallest known limit."""
    source = packing.source
    known = [(1 << 63, "no vocabulary is that large")]
    if vocab_size is not None:
        known.append((vocab_size, f"the model's vocab_size is {vocab_size}"))
    if source.vocab_size is not None:
        known.append((source.vocab_size, f"its tokenizer has {source.vocab_size} ids"))
    if source.max_id is not None:
        when = getattr(source, "max_id_from", "when it was opened")
        known.append((source.max_id + 1, f"the largest id {when} was {source.max_id}"))
    return min(known)


def _refuse_borders(packing: Packing | StreamPacking, numbers: np.ndarray, cut: RowWindows) -> None:
    """Checks document ends of sources that were not checked completely: those with a large index, and those of plugins."""
    rows, columns = cut.rows, cut.columns
    if getattr(packing.source, "borders_checked", False) or not len(rows):
        return
    width = cut.windows.shape[1]
    outside = (columns - 1).view(np.uint64) >= width - 1  # as unsigned numbers, negative ones are very large
    flat = rows * width + columns
    falling = flat[1:] <= flat[:-1]
    if outside.any() or falling.any():
        row = int(rows[np.argmax(outside) if outside.any() else np.argmax(falling) + 1])
        where = "" if isinstance(packing, StreamPacking) else f" at token {packing.token_at(int(numbers[row]), 0)}"
        advice = "run `data verify` to find the file and the byte"
        raise DataError(f"{packing.source.name}{where}: document ends do not ascend; {advice}")


def _place_of_token(packing: Packing, row: int, column: int) -> str:
    """Returns the place of a token for messages, with file and byte if the source provides them."""
    token = packing.token_at(row, column)
    place = getattr(packing.source, "place", None)
    return f" at token {token} ({place(token)})" if place else f" at token {token}"


class RowReader:
    """Builds the rows of every step in a `SampleOrder`.

    Attributes:
        spec: spec of the run.
        order: determines the rows of each step.
        packings: packing of each source, in rows of `order.unit` tokens.
        streams: packings of the streamed sources by source number.
    """

    def __init__(self, spec: LoadSpec, order: SampleOrder, packings: Sequence[Packing | StreamPacking]) -> None:
        self.spec, self.order, self.packings = spec, order, packings
        self.streams = {index: packing for index, packing in enumerate(packings) if isinstance(packing, StreamPacking)}
        self._assemblers: dict[int, Assembler] = {}

    def fill(self, rows: TokenRows, step: int, start: int, stop: int, at: int = 0) -> None:
        """Writes rows [start, stop) of the global batch of a step into `rows`, from its row `at` on.

        Streams are read sequentially, so their rows must be requested in ascending order.
        """
        sources, numbers = self.order.rows_of(step, start, stop)
        self._assembler(self.order.timeline.span_at(step).length).fill(rows, at, sources, numbers)

    def place_of(self, step: int, row: int, column: int) -> tuple[str, str]:
        """Returns (label of the source, place in the source) of a token of a step's global batch, for messages."""
        (source,), (number,) = (array.tolist() for array in self.order.rows_of(step, row, row + 1))
        packing = self._assembler(self.order.timeline.span_at(step).length).packings[source]
        if isinstance(packing, StreamPacking):
            return self.order.labels[source], packing.source.name
        return self.order.labels[source], place_of(packing.source, packing.token_at(number, column))

    def positions_after(self, step: int) -> dict[str, dict[str, Any]]:
        """Returns the positions of the streams after a step, by label; skips the rows of other ranks."""
        positions = {}
        draws = self._draws_before(step + 1)
        for source, streamed in self.streams.items():
            streamed.skip_to(draws[source])
            positions[self.order.labels[source]] = streamed.position()
        return positions

    def seek(self, step: int, positions: Mapping[str, Position]) -> None:
        """Continues the streams at a step, at their `positions`; streams without a position start at their first document."""
        draws = self._draws_before(step)
        for source, streamed in self.streams.items():
            streamed.seek(draws[source], positions.get(self.order.labels[source]))

    def _draws_before(self, step: int) -> list[int]:
        timeline = self.order.timeline
        return timeline.draws(timeline.first_of(step)) if self.streams else []

    def _assembler(self, length: int) -> Assembler:
        if length not in self._assemblers:
            packings = [
                ConcatenatedPacking(packing.source, length) if isinstance(packing, ConcatenatedPacking) else packing
                for packing in self.packings
            ]
            self._assemblers[length] = Assembler(packings, self.spec, length, self.order.unit // length)
        return self._assemblers[length]


def open_rows(spec: LoadSpec, opened: OpenedSources, report: Callable[[str], None]) -> RowReader:
    """Returns the reader of the rows of a run from its open sources.

    Raises:
        ForgeError: the sources do not match the recipe.
    """
    intervals = intervals_for(spec, opened)
    packings = open_packings(spec, opened, intervals, report)
    rows = [None if isinstance(packing, StreamPacking) else packing.rows for packing in packings]
    return RowReader(spec, SampleOrder(spec, opened, intervals, rows), packings)


if TYPE_CHECKING:
    from torch import Tensor

    Parts = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
