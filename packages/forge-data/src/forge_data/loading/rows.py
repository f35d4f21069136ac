"""Rows of any step: windows of tokens from the packings of the sources, as model inputs in one piece of memory.

From the bottom up: `shift` makes labels from a window, `Rows` holds model inputs and cuts batches from them, an `Assembler`
fills them from several packings, and a `RowReader` does so for any step. Nothing here imports torch before a batch is made.
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
"""Of memory for a token."""
_CHUNK = 1 << 17
"""Tokens that are worked on at a time, so that intermediate arrays stay in the cache."""


def shift(
    windows: np.ndarray, rows: np.ndarray, columns: np.ndarray, tokens: np.ndarray, labels: np.ndarray, at: np.ndarray
) -> None:
    """Writes model inputs and labels of a set of windows. This is the only label shift.

    Logits at position t are scored against the token after it. No label crosses a document border: the last token of a
    document predicts nothing. Where documents end in an end-of-document token, the token before it predicts it, and it
    predicts nothing itself.

    Args:
        windows: (N, T + 1) token ids: each row's tokens and the one after them, any integer dtype.
        rows, columns: (K,) int64, document ends inside the windows: token `columns - 1` of the window is the last of
            its document, 1 <= column <= T.
        tokens: (M, T) int64, of which rows `at` are written.
        labels: (M, T) int64; `IGNORE` where there is nothing to predict.
        at: (N,) int64, the row of each window.

    Raises:
        DataError: ids that are not integers, which would be rounded.
    """
    if windows.dtype.kind not in "ui":
        raise DataError(f"token ids must be integers, got {windows.dtype.name} from a source")
    tokens[at] = windows[:, :-1]
    labels[at] = windows[:, 1:]
    labels[at[rows], columns - 1] = IGNORE


class Buffers:
    """Keeps the arrays it handed out and hands them out again when only this pool refers to them.

    Fresh memory costs more than filling it. A tensor made by `torch.from_numpy` refers to its array for as long as any view
    of it lives, so a batch that someone keeps is never overwritten.
    """

    def __init__(self, make: Callable[[tuple[int, ...], Any], np.ndarray] = np.empty) -> None:
        """`make` gives a new array of a shape and dtype that owns its memory, or whose owner is not an array."""
        self._make = make
        self._arrays: list[np.ndarray] = []
        probe = [np.empty(0)]
        self._unused = _references(probe, 0)

    def take(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An array of undefined content."""
        for index in range(len(self._arrays)):
            array = self._arrays[index]
            fits = array.shape == shape and array.dtype == dtype
            del array
            if fits and _references(self._arrays, index) == self._unused:
                return self._arrays[index]
        self._arrays.append(self._make(shape, dtype))
        return self._arrays[-1]

    def held(self) -> set[int]:
        """Identities of the arrays of this pool."""
        return {id(array) for array in self._arrays}

    def drop_others(self, shape: tuple[int, ...]) -> None:
        """Drops arrays of another shape, which will not be needed again."""
        self._arrays = [array for array in self._arrays if array.shape == shape]


def _references(arrays: list[np.ndarray], index: int) -> int:
    return sys.getrefcount(arrays[index])


class Rows:
    """Tokens and labels (N, T) int64, by their marks also positions and documents (N, T) int32, or a token mask (N, T) bool.

    They lie behind each other in one array of bytes, which may be shared between processes.
    """

    def __init__(self, memory: np.ndarray, count: int, length: int, marks: Marks) -> None:
        """`memory` has at least `size_of(count, length, marks)` bytes, uint8."""
        shape, size = (count, length), count * length
        self.tokens = memory[: 8 * size].view(np.int64).reshape(shape)
        self.labels = memory[8 * size : 16 * size].view(np.int64).reshape(shape)
        with_documents = marks == "documents"
        self.positions = memory[16 * size : 20 * size].view(np.int32).reshape(shape) if with_documents else None
        self.documents = memory[20 * size : 24 * size].view(np.int32).reshape(shape) if with_documents else None
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


class Assembler:
    """Cuts rows from several packings and fills model inputs with them."""

    def __init__(self, packings: Sequence[Packing | StreamPacking], spec: LoadSpec, length: int, pieces: int = 1) -> None:
        """
        Args:
            packings: of each source.
            spec: of the run: the vocabulary that ids are compared with.
            length: T, tokens of a row.
            pieces: rows that are cut from one sample; streams are read in whole samples.
        """
        self.packings = packings
        self.length = length
        self._pieces = pieces
        self._limits = [_id_limit(packing, spec.vocab_size) for packing in packings]

    def fill(self, rows: Rows, at: int, sources: np.ndarray, numbers: np.ndarray) -> None:
        """Writes rows `numbers` (N,) of packings `sources` (N,), in this order, from row `at` on."""
        for source in range(len(self.packings)):
            own = np.flatnonzero(sources == source)
            # Chunks of about the same size: a short rest costs as much besides its tokens as a whole one.
            chunks = max(1, round(len(own) * self.length / _CHUNK))
            size = max(1, -(-len(own) // (chunks * self._pieces))) * self._pieces
            for start in range(0, len(own), size):
                part = own[start : start + size]
                rows.fill(at + part, self._cut(source, numbers[part]))

    def cut_last(self, source: int) -> tuple[RowWindows, int]:
        """The short last row of a packing; see `Packing.cut_last`."""
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
        """Looks at every id that is read: what was known of a file when it was opened may not be what it holds now."""
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
            found = int(windows[row, column])
            where = "" if isinstance(packing, StreamPacking) else _place_of_token(packing, int(numbers[row]), column)
            raise DataError(f"{packing.source.name}{where}: id {found}, but {why if found >= 0 else 'no id is negative'}")


def _id_limit(packing: Packing | StreamPacking, vocab_size: int | None) -> tuple[int, str]:
    """(first id that no row of a packing may hold, why): the smallest of what is known."""
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
    """Of a large index only a part was checked before it was used; of a plugin's source nothing."""
    rows, columns = cut.rows, cut.columns
    if getattr(packing.source, "borders_checked", False) or not len(rows):
        return
    width = cut.windows.shape[1]
    outside = (columns - 1).view(np.uint64) >= width - 1  # as unsigned numbers, those below 0 are very large
    flat = rows * width + columns
    falling = flat[1:] <= flat[:-1]
    if outside.any() or falling.any():
        row = int(rows[np.argmax(outside) if outside.any() else np.argmax(falling) + 1])
        where = "" if isinstance(packing, StreamPacking) else f" at token {packing.token_at(int(numbers[row]), 0)}"
        raise DataError(f"{packing.source.name}{where}: document ends do not ascend; `data verify` names the file and the byte")


def _place_of_token(packing: Packing, row: int, column: int) -> str:
    """The place of a token, with file and byte where the source knows them."""
    token = packing.token_at(row, column)
    place = getattr(packing.source, "place", None)
    return f" at token {token} ({place(token)})" if place else f" at token {token}"


class RowReader:
    """Makes the rows that a `SampleOrder` names.

    Attributes:
        spec: of the run.
        order: which rows a step has.
        packings: of each source in rows of `order.unit` tokens.
        streams: number and rows of each streamed source.
    """

    def __init__(self, spec: LoadSpec, order: SampleOrder, packings: Sequence[Packing | StreamPacking]) -> None:
        self.spec, self.order, self.packings = spec, order, packings
        self.streams = {index: packing for index, packing in enumerate(packings) if isinstance(packing, StreamPacking)}
        self._assemblers: dict[int, Assembler] = {}

    def fill(self, rows: Rows, step: int, start: int, stop: int, at: int = 0) -> None:
        """Writes rows [start, stop) of the global batch of a step into `rows`, from its row `at` on.

        A stream goes on from row to row: its rows are read in ascending order.
        """
        sources, numbers = self.order.rows_of(step, start, stop)
        self._assembler(self.order.timeline.span_at(step).length).fill(rows, at, sources, numbers)

    def place_of(self, step: int, row: int, column: int) -> tuple[str, str]:
        """(label of the source, where in it the token lies) of a token of the global batch of a step, for messages."""
        (source,), (number,) = (found.tolist() for found in self.order.rows_of(step, row, row + 1))
        packing = self._assembler(self.order.timeline.span_at(step).length).packings[source]
        if isinstance(packing, StreamPacking):
            return self.order.labels[source], packing.source.name
        return self.order.labels[source], place_of(packing.source, packing.token_at(number, column))

    def positions_after(self, step: int) -> dict[str, dict[str, Any]]:
        """Where the streams go on after a step, by source; reads over what other ranks take of the step."""
        found = {}
        draws = self._draws_before(step + 1)
        for source, streamed in self.streams.items():
            streamed.skip_to(draws[source])
            found[self.order.labels[source]] = streamed.position()
        return found

    def seek(self, step: int, positions: Mapping[str, Position]) -> None:
        """Continues the streams at a step: at their `positions`, those without one at their first document."""
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
    """The order of a run and its rows, from sources that are open.

    Raises:
        ForgeError: the sources do not fit the recipe.
    """
    intervals = intervals_for(spec, opened)
    packings = open_packings(spec, opened, intervals, report)
    rows = [None if isinstance(packing, StreamPacking) else packing.rows for packing in packings]
    return RowReader(spec, SampleOrder(spec, opened, intervals, rows), packings)


if TYPE_CHECKING:
    from torch import Tensor

    Parts = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
