"""Sources that can only be read in order: virtual readers whose position is five integers, shuffled in windows.

The shards of a stream are dealt to a fixed number of virtual readers, at any world size. Which reader a place of
the global batch belongs to depends on that place alone, so a world whose size divides the number of readers reads the
same samples in the same order, each rank only the shards of its readers.

A reader takes the next `buffer` documents of a shard at a time and gives them out in a random order that follows from
(seed, reader, epoch, shard, window). So its shuffle buffer needs no saving: reading the window again, at most `buffer`
documents, makes the same buffer. Rows are cut from the documents back to back, across windows, shards and epochs.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

import numpy as np

from forge_core.errors import DataError
from forge_core.protocols.data import StreamedSource
from forge_data.order.permutation import key_of, permute
from forge_data.packing.concatenate import RowWindows

Position = list[int]
"""[epoch, place in the reader's list of parts, first document of the window, documents used of it, tokens used of the next]."""


class Reader:
    """One virtual reader: an endless sequence of rows.

    A part is a shard; where there are fewer shards than readers, a shard is dealt out document by document, and every one
    of its readers skips what belongs to the others.
    """

    def __init__(self, source: StreamedSource, number: int, readers: int, seed: object, buffer: int, shuffle: bool) -> None:
        if source.shards < 1:
            raise DataError(f"{source.name} has no shard to read")
        self.source = source
        self._stripes = -(-readers // source.shards)
        self._parts = np.arange(number, source.shards * self._stripes, readers)
        self._key = key_of("stream", seed, number)
        self._buffer = buffer
        self._shuffle = shuffle
        self._documents: Iterator[np.ndarray] = iter(())
        self.seek([0, 0, 0, 0, 0])

    def seek(self, position: Position) -> None:
        """Goes to a position that `position` gave; reads the window that it lies in again, at the first row."""
        self._epoch, self._place, self._window, self._skipped, self._offset = position
        self._ahead: deque[tuple[Position, np.ndarray]] = deque()
        self._have = -self._offset  # tokens that lie ahead, less those of the first document that are used
        self._opened = False
        self._dry = 0  # times that the last part ended since a document had a token

    def position(self) -> Position:
        """Where the next row begins."""
        if not self._ahead:
            return [self._epoch, self._place, self._window, self._skipped, self._offset]
        return [*self._ahead[0][0], self._offset]

    def next(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """The next row: (length + 1,) token ids, and the columns of document ends in it, 1 to `length`.

        Raises:
            DataError: the stream has no token, or a document is not a list of ids.
        """
        while self._have <= length:
            self._load()
        parts: list[np.ndarray] = []
        columns: list[int] = []
        column, offset = 0, self._offset
        for _, document in self._ahead:
            part = document[offset : offset + length + 1 - column]
            parts.append(part)
            column += len(part)
            if offset + len(part) == len(document) and column <= length:
                columns.append(column)
            offset = 0
            if column > length:
                break
        self._offset += length
        self._have -= length
        while self._offset >= len(self._ahead[0][1]):
            self._offset -= len(self._ahead.popleft()[1])
        return np.concatenate(parts), np.array(columns, dtype=np.int64)

    def _load(self) -> None:
        """Reads the next window."""
        part = int(self._order()[self._place])
        shard, stripe = part % self.source.shards, part // self.source.shards
        if not self._opened:
            documents = self.source.stream(shard, self._window * self._stripes + stripe)
            self._documents = islice(documents, 0, None, self._stripes)
            self._opened = True
        found = [_checked(document, self.source) for document in islice(self._documents, self._buffer)]
        base = [self._epoch, self._place, self._window]
        order = np.arange(len(found))
        if self._shuffle and len(found) > 1:
            key = key_of("window", self._key, *base)
            order = permute(order, len(found), key, np.zeros_like(order))
        skipped, self._skipped = self._skipped, 0
        for used, number in enumerate(order.tolist()):
            if used >= skipped and len(found[number]):
                self._ahead.append(([*base, used], found[number]))
                self._have += len(found[number])
                self._dry = 0
        self._window += len(found)
        if len(found) < self._buffer:  # it was the last window of its part
            self._next_part()

    def _next_part(self) -> None:
        self._place, self._window, self._opened = self._place + 1, 0, False
        if self._place < len(self._parts):
            return
        self._epoch, self._place, self._dry = self._epoch + 1, 0, self._dry + 1
        if self._dry > 1:
            raise DataError(f"{self.source.name}: shards {(self._parts % self.source.shards).tolist()} have no tokens")

    def _order(self) -> np.ndarray:
        if not self._shuffle or len(self._parts) == 1:
            return self._parts
        places = np.arange(len(self._parts))
        return self._parts[permute(places, len(places), self._key, np.full_like(places, self._epoch))]


class Streamed:
    """The readers of one source, as a packing whose row number tells only which reader the row comes from."""

    def __init__(self, source: StreamedSource, readers: int, unit: int, seed: object, buffer: int, shuffle: bool) -> None:
        self.source = source
        self.readers = readers
        self.unit = unit
        self._made: dict[int, Reader] = {}
        self._how = (seed, buffer, shuffle)

    def cut(self, numbers: np.ndarray, length: int) -> RowWindows:
        """The next samples of readers `numbers // pieces` (N,): each sample is `pieces = unit / length` neighboring rows."""
        pieces = self.unit // length
        windows, rows, columns = [], [], []
        for first in range(0, len(numbers), pieces):
            window, ends = self._reader(int(numbers[first]) // pieces).next(self.unit)
            for piece in range(pieces):
                start = piece * length
                own = ends[(ends > start) & (ends <= start + length)] - start
                windows.append(window[start : start + length + 1])
                rows.append(np.full(len(own), first + piece))
                columns.append(own)
        return RowWindows(np.stack(windows), np.concatenate(rows), np.concatenate(columns))

    def positions(self, readers: Iterable[int]) -> dict[str, Position]:
        """Where these readers go on."""
        return {str(number): self._reader(number).position() for number in readers}

    def seek(self, positions: Mapping[str, Position]) -> None:
        """Continues readers at `positions`; the others begin at the beginning."""
        self._made.clear()
        for number, position in positions.items():
            self._reader(int(number)).seek(list(position))

    def _reader(self, number: int) -> Reader:
        if number not in self._made:
            seed, buffer, shuffle = self._how
            self._made[number] = Reader(self.source, number, self.readers, seed, buffer, shuffle)
        return self._made[number]


def readers_for(wanted: int | None, units: Sequence[int]) -> int:
    """The number of virtual readers: as stated, or the largest power of two up to 64 that divides the samples of every step.

    Raises:
        DataError: the stated one does not divide them.
    """
    if wanted is None:
        return max(number for number in (1, 2, 4, 8, 16, 32, 64) if all(unit % number == 0 for unit in units))
    if wrong := [unit for unit in units if unit % wanted]:
        raise DataError(f"data.readers = {wanted} does not divide the {wrong[0]} samples of a step; choose a divisor of them")
    return wanted


def refuse_ranks(ranks: int, readers: int) -> None:
    """Refuses a world that cannot share the readers.

    Raises:
        DataError: naming the legal numbers of data ranks.
    """
    if readers % ranks:
        legal = ", ".join(str(number) for number in range(1, readers + 1) if readers % number == 0)
        raise DataError(
            f"a streamed source has {readers} virtual readers, which cannot be divided among {ranks} data ranks; legal "
            f"numbers of data ranks are {legal}"
        )


def _checked(document: np.ndarray, source: StreamedSource) -> np.ndarray:
    document = np.asarray(document)
    if document.ndim != 1 or (len(document) and document.dtype.kind not in "ui"):
        raise DataError(f"{source.name}: a document must be a 1-D array of integer ids, found {document.dtype} {document.shape}")
    return document
