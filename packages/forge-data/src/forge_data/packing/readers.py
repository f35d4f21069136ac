"""Sources that can only be read in order, as one endless sequence of documents that is equal on every rank, cut into rows.

An epoch reads every document of every shard exactly once before the next epoch begins. So the numbers of reads of any two
documents differ by at most one, whatever the sizes of the shards. `readers` shards are open at a time, and one document is
taken from each in turn; at the end of a shard, its reader opens the next shard in the random order of the epoch. Windows of
`buffer` documents are shuffled, in an order that follows from (seed, epoch, window). Rows are cut from the shuffled documents
back to back, across windows, shards and epochs.

The number of documents in a shard and their lengths are known only after reading it. So the position of a row depends on all
documents before it; every rank reads all documents and keeps its own rows (`docs/adr/0037`). A stream position is the state
of the readers before a window and a place in the window. The shuffle buffer is not saved: reading the window again, at most
`buffer` documents, restores it.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from forge_core.errors import DataError
from forge_core.protocols.data import StreamedSource
from forge_data.order.permutation import key_of, permute
from forge_data.packing.concatenation import RowWindows

READERS = 16
"""Default number of shards that are open at a time."""

Position = Mapping[str, Any]
"""Position of a stream as JSON: `epoch`; its `window`; `readers` before the window, each as [place of the shard in the epoch's
order, documents read]; number of `opened` shards; documents `used` of the window; and `offset` in the next document."""


@dataclass(eq=False)
class _VirtualReader:
    """One open shard: its place in the epoch's order, the number of documents read, and the iterator of the next ones."""

    place: int
    read: int = 0
    documents: "Iterator[np.ndarray] | None" = None


class ShuffledDocuments:
    """The endless sequence of a stream's documents, epoch by epoch, in windows."""

    def __init__(self, source: StreamedSource, readers: int | None, seed: object, buffer: int, shuffle: bool) -> None:
        """
        Args:
            source: the source to read.
            readers: number of shards that are open at a time; None: `READERS`.
            seed: seed of the order of shards, and of documents in a window.
            buffer: documents per window.
            shuffle: False reads shard by shard and document by document, in stored order.

        Raises:
            DataError: there is no shard.
        """
        if source.shards < 1:
            raise DataError(f"{source.name} has no shard to read")
        self.source = source
        self._most = min(readers or READERS, source.shards, buffer) if shuffle else 1
        self._key = key_of("stream", seed)
        self._buffer = buffer
        self._shuffle = shuffle
        self._begin(0)

    def state(self) -> dict[str, Any]:
        """Returns the position of the next window."""
        readers = [[reader.place, reader.read] for reader in self._readers]
        return {"epoch": self._epoch, "window": self._window, "readers": readers, "opened": self._opened}

    def seek(self, state: Position) -> None:
        """Continues at a result of `state`.

        Raises:
            DataError: the source has lost shards since then.
        """
        self._begin(state["epoch"])
        self._window, self._opened = state["window"], state["opened"]
        self._readers = [_VirtualReader(place, read) for place, read in state["readers"]]
        if self._opened > self.source.shards:
            raise DataError(
                f"the data position is in a stream of at least {self._opened} shards, but {self.source.name} now has "
                f"{self.source.shards}; restore the missing shards, or start a new run"
            )

    def next(self) -> tuple[dict[str, Any], list[tuple[int, np.ndarray]]]:
        """Returns the next window: the state before it, and (number in the window, ids) of its non-empty documents, shuffled.

        Raises:
            DataError: all documents of an epoch are empty, or a document is not an array of ids.
        """
        before, documents = self.state(), self._read()
        while not documents:  # the epoch has ended
            if self._empty:
                raise DataError(f"{self.source.name} has no tokens: all documents of its {self.source.shards} shards are empty")
            self._begin(self._epoch + 1)
            self._empty = True
            before, documents = self.state(), self._read()
        order = np.arange(len(documents))
        if self._shuffle and len(documents) > 1:
            key = key_of("window", self._key, self._epoch, self._window)
            order = permute(order, len(documents), key, np.zeros_like(order))
        self._window += 1
        shuffled = [(used, documents[number]) for used, number in enumerate(order.tolist()) if len(documents[number])]
        self._empty = self._empty and not shuffled
        return before, shuffled

    def _read(self) -> list[np.ndarray]:
        """Returns the next documents of the epoch, at most `buffer`: one from each reader in turn."""
        documents: list[np.ndarray] = []
        turn = 0
        while len(documents) < self._buffer and self._readers:
            turn %= len(self._readers)
            reader = self._readers[turn]
            if reader.documents is None:
                reader.documents = iter(self.source.stream(int(self._order[reader.place]), reader.read))
            document = next(reader.documents, None)
            if document is not None:
                documents.append(_checked(document, self.source))
                reader.read += 1
                turn += 1
            elif self._opened < len(self._order):
                self._readers[turn] = _VirtualReader(self._opened)
                self._opened += 1
            else:
                del self._readers[turn]
        return documents

    def _begin(self, epoch: int) -> None:
        self._epoch, self._window, self._opened = epoch, 0, self._most
        self._readers = [_VirtualReader(place) for place in range(self._most)]
        self._empty = False  # whether all documents of this epoch so far are empty
        self._order = np.arange(self.source.shards)
        if self._shuffle and self.source.shards > 1:
            self._order = permute(self._order, self.source.shards, self._key, np.full_like(self._order, epoch))


class StreamPacking:
    """The packing of one stream, whose samples must be cut in ascending order.

    Attributes:
        source: the streamed source.
        unit: tokens per sample: the longest row of the run.
    """

    def __init__(self, source: StreamedSource, readers: int | None, unit: int, seed: object, buffer: int, shuffle: bool) -> None:
        """
        Args:
            source, readers, seed, buffer, shuffle: see `ShuffledDocuments`.
            unit: tokens per sample.
        """
        self.source = source
        self.unit = unit
        self._how = (readers, seed, buffer, shuffle)
        self.seek(0)

    def seek(self, sample: int, position: Position | None = None) -> None:
        """Continues with a sample at its position, or with the first document. Reads nothing before the next `cut`."""
        self._documents = ShuffledDocuments(self.source, *self._how)
        self._position = dict(position or self._documents.state() | {"used": 0, "offset": 0})
        self._documents.seek(self._position)
        self._sample = sample
        self._last: tuple[np.ndarray, np.ndarray] | None = None
        self._skipped, self._offset = self._position["used"], self._position["offset"]
        self._ahead: deque[tuple[dict[str, Any], int, np.ndarray]] = deque()  # with the state before the window
        self._have = -self._offset  # unused tokens in `_ahead`

    def position(self) -> dict[str, Any]:
        """Returns the position of the next sample."""
        if not self._ahead:
            return self._position
        state, used, _ = self._ahead[0]
        return state | {"used": used, "offset": self._offset}

    def cut(self, numbers: np.ndarray, length: int) -> RowWindows:
        """Returns rows `numbers` (N,) of `length` tokens, ascending; row n is a part of sample `n * length // unit`.

        Raises:
            DataError: the stream has no tokens, or a document is not an array of ids.
        """
        pieces = self.unit // length
        windows, rows, columns = [], [], []
        for row, number in enumerate(numbers.tolist()):
            window, ends = self._sample_at(number // pieces)
            start = number % pieces * length
            own = ends[(ends > start) & (ends <= start + length)] - start
            windows.append(window[start : start + length + 1])
            rows.append(np.full(len(own), row))
            columns.append(own)
        return RowWindows(np.stack(windows), np.concatenate(rows), np.concatenate(columns))

    def skip_to(self, sample: int) -> None:
        """Skips the samples before `sample`, which other ranks cut."""
        assert sample >= self._sample, f"sample {sample} of {self.source.name} was cut before"
        for _ in range(sample - self._sample):
            self._load()
            self._advance()
            self._last = None

    def _sample_at(self, sample: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns a sample: (unit + 1,) token ids, and the columns of its document ends, 1 to `unit`."""
        if self._last is None or sample != self._sample - 1:
            self.skip_to(sample)
            self._load()
            self._last = self._cut()
            self._advance()
        return self._last

    def _cut(self) -> tuple[np.ndarray, np.ndarray]:
        parts: list[np.ndarray] = []
        columns: list[int] = []
        column, offset = 0, self._offset
        for _, _, document in self._ahead:
            part = document[offset : offset + self.unit + 1 - column]
            parts.append(part)
            column += len(part)
            if offset + len(part) == len(document) and column <= self.unit:
                columns.append(column)
            offset = 0
            if column > self.unit:
                break
        return np.concatenate(parts), np.array(columns, dtype=np.int64)

    def _advance(self) -> None:
        self._sample += 1
        self._offset += self.unit
        self._have -= self.unit
        while self._offset >= len(self._ahead[0][2]):
            self._offset -= len(self._ahead.popleft()[2])

    def _load(self) -> None:
        """Reads windows until `_ahead` contains the next sample and the token after it."""
        while self._have <= self.unit:
            state, documents = self._documents.next()
            self._ahead.extend((state, used, ids) for used, ids in documents if used >= self._skipped)
            self._have += sum(len(ids) for used, ids in documents if used >= self._skipped)
            self._skipped = 0


def _checked(document: np.ndarray, source: StreamedSource) -> np.ndarray:
    document = np.asarray(document)
    if document.ndim != 1 or (len(document) and document.dtype.kind not in "ui"):
        raise DataError(f"{source.name}: a document must be a 1-D array of integer ids, found {document.dtype} {document.shape}")
    return document
