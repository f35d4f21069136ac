"""Token ids of many files as one stream, and where its documents end.

A file is mapped at its first read; a limited number stays mapped. Document ends are listed by an index, or marked by a token that
ends or begins each document.
"""

import mmap
import os
import resource
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from forge_core.errors import DataError
from forge_data.storage.files import File, local_path, read_bytes

Thing = TypeVar("Thing")
READS = 64
"""Reads per check of a mapped file's size, because a check costs more than a read. `windows` checks at every call."""


@dataclass(frozen=True)
class Shard:
    """One file of `tokens` token ids, which begin after `offset` bytes."""

    file: File
    tokens: int
    offset: int = 0


class LRUCache(Generic[Thing]):
    """Opens objects by number and keeps the most recently used ones, because mapped files use up file descriptors."""

    def __init__(self, make: Callable[[int], Thing], limit: int | None = None) -> None:
        self._make = make
        self._limit = limit or open_files()
        self._things: dict[int, Thing] = {}

    def __getitem__(self, number: int) -> Thing:
        # Needs no lock: at worst, two threads open the same file twice.
        thing = self._things.pop(number, None)
        if thing is None:
            thing = self._make(number)
            while len(self._things) >= self._limit:
                self._things.pop(next(iter(self._things)), None)
        self._things[number] = thing
        return thing

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the open objects: pickling a map would copy the file. Another process opens its own."""
        return self.__dict__ | {"_things": {}}


class _Unshrunk:
    """The mapped files of a stream; checks the size of a file at every access."""

    def __init__(self, stream: "Shards") -> None:
        self._stream = stream

    def __getitem__(self, number: int) -> np.ndarray:
        tokens = self._stream._data[number]
        refuse_shrunk(tokens, self._stream.shards[number].file.where)
        return tokens


class Shards:
    """Random access to the stream.

    Attributes:
        shards: the shards in the order of the stream.
        dtype: dtype of all shards.
        tokens: total number of tokens.
        firsts: stream position of each shard's first token, then `tokens`.
        remote: whether a file must be downloaded before it can be mapped.
    """

    def __init__(self, shards: Sequence[Shard], dtype: np.dtype, kept: int | None = None) -> None:
        self.shards = tuple(shards)
        self.dtype = dtype
        self.firsts = [0, *accumulate(shard.tokens for shard in self.shards)]
        self.tokens = self.firsts[-1]
        self._data = LRUCache(self._map, kept)
        self._unshrunk = _Unshrunk(self)
        self._reads = 0
        self._only = len(self.shards) == 1
        self._after = np.array(self.firsts[1:], dtype=np.int64)
        self._inner = self._after[:-1]
        self.remote = any(shard.file.remote for shard in self.shards)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns token ids [start, stop): a view of the mapped file if they lie in one shard."""
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens [{start}, {stop}) are not inside the {self.tokens} tokens")
        self._reads += 1
        data = self._data if self._reads % READS else self._unshrunk
        if self._only:
            return data[0][start:stop]
        number = self.shard_of(start)
        first = self.firsts[number]
        if stop <= self.firsts[number + 1]:
            return data[number][start - first : stop - first]
        parts = []
        while first < stop:
            parts.append(data[number][max(0, start - first) : stop - first])
            number += 1
            first = self.firsts[number] if number < len(self.shards) else stop
        return np.concatenate(parts)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Returns (N, length) token ids: one window from each of `starts` (N,)."""
        if not len(starts):
            return np.empty((0, length), self.dtype)
        starts = starts.astype(np.int64)
        if not 0 <= int(starts.min()) <= int(starts.max()) <= self.tokens - length:
            raise IndexError(
                f"windows of {length} tokens from {starts.min()} to {starts.max()} are not inside the {self.tokens} tokens"
            )
        if self._only:
            return _gathered(self._unshrunk[0], starts, length)
        windows = np.empty((len(starts), length), self.dtype)
        numbers = np.searchsorted(self._inner, starts, side="right")
        whole = starts + length <= self._after[numbers]
        for number in np.unique(numbers[whole]).tolist():
            own = np.flatnonzero((numbers == number) & whole)
            windows[own] = _gathered(self._unshrunk[number], starts[own] - self.firsts[number], length)
        for row in np.flatnonzero(~whole).tolist():
            windows[row] = self.read(int(starts[row]), int(starts[row]) + length)
        return windows

    def shard_of(self, token: int) -> int:
        """Returns the number of the shard that holds a token; the last shard for the end of the stream."""
        return min(bisect_right(self.firsts, token) - 1, len(self.shards) - 1)

    def place(self, token: int) -> str:
        """Returns file and byte offset of a token, for messages."""
        number = self.shard_of(token)
        shard = self.shards[number]
        return f"{shard.file.where} at byte {shard.offset + (token - self.firsts[number]) * self.dtype.itemsize}"

    def peek(self, start: int, stop: int) -> np.ndarray:
        """Returns the same as `read`, without downloading whole remote files."""
        if not self.remote:
            return self.read(start, stop)
        parts = [np.empty(0, self.dtype)]
        while start < stop:
            number = self.shard_of(start)
            shard, first = self.shards[number], self.firsts[number]
            until = min(stop, self.firsts[number + 1])
            low, high = (shard.offset + (token - first) * self.dtype.itemsize for token in (start, until))
            parts.append(np.frombuffer(read_bytes(shard.file, low, high), self.dtype))
            start = until
        return np.concatenate(parts)

    def _map(self, number: int) -> np.ndarray:
        shard = self.shards[number]
        return map_file(shard.file, self.dtype, shard.tokens, shard.offset)


def _gathered(tokens: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """Copies all windows of a shard in one numpy call, which is several times faster than one call per window."""
    step = tokens.itemsize
    overlapping = np.ndarray((len(tokens) - length + 1, length), tokens.dtype, tokens, strides=(step, step))
    return overlapping[starts]


def map_file(file: File, dtype: np.dtype, count: int, offset: int = 0) -> np.ndarray:
    """Maps a file and returns a (count,) read-only view of its bytes after `offset`.

    Raises:
        DataError: the file is too short, or cannot be opened.
    """
    size = offset + count * dtype.itemsize
    if not count:
        return np.empty(0, dtype)
    try:
        with local_path(file).open("rb") as content:
            actual = os.fstat(content.fileno()).st_size
            if actual < size:
                raise DataError(f"{file.where} is truncated: it ends at byte {actual}, {size} are needed; restore the file")
            # np.memmap takes three times as long to create, and a microsecond more per slice.
            return np.frombuffer(mmap.mmap(content.fileno(), size, access=mmap.ACCESS_READ), dtype, count, offset)
    except OSError as error:
        raise DataError(f"{file.where} cannot be read: {error.strerror}") from error


def refuse_shrunk(array: np.ndarray, where: str) -> None:
    """Refuses a mapped file that was truncated since: missing bytes read as zeros, or kill the process by SIGBUS.

    A truncation between this check and the read is not detected.

    Raises:
        DataError: the file is shorter than its map.
    """
    base = array.base
    if isinstance(base, memoryview):
        mapping: Any = base.obj
        if (size := mapping.size()) < len(mapping):
            raise DataError(
                f"{where} was truncated to {size} bytes while it was read, {len(mapping)} are needed; restore the file, and "
                "never change a file in place during a run"
            )


def open_files() -> int:
    """Returns how many files one stream keeps mapped: an eighth of this process's limit of open files, at most 1,024."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1024 if limit == resource.RLIM_INFINITY else max(8, min(1024, limit // 8))


CHECKED = 32
"""Number of tables that are checked when the corpus is opened; the others are checked at their first use."""
_WHOLE = 1 << 23
"""Documents of the largest table that is checked completely. Of larger ones, `CHECKED` blocks are checked at opening, and the
others as rows are cut."""
_BLOCK, _PART = 4096, 1 << 18


class Documents(Protocol):
    """Document ends of a stream; see `Source.ends` and `Source.borders`.

    Attributes:
        checked: whether all tables used so far were checked completely; if not, each row is checked when it is cut.
    """

    checked: bool

    def ends(self, start: int, stop: int) -> np.ndarray: ...

    def borders(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]: ...


class EndsTable(Protocol):
    """Document ends of one shard, counted from its start."""

    def ends(self, start: int, stop: int) -> np.ndarray: ...

    def borders(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]: ...

    def __len__(self) -> int:
        """Number of entries to check: documents, or their sequences."""
        ...

    def faults(self, whole: bool) -> list[str]:
        """Returns faults with file and byte. Without `whole`, only blocks of a large table are checked."""
        ...


class Ends:
    """A table stored as an ascending array of uint64, which may be memory-mapped.

    An empty document ends where the previous document ends; both share one border.
    """

    def __init__(self, array: np.ndarray, tokens: int, where: str, offset: int = 0, empty: bool = True) -> None:
        """
        Args:
            array: (documents,) document ends.
            tokens: number of tokens of the shard, where the last document ends.
            where: the file, for messages.
            offset: bytes in the file before the first end.
            empty: whether documents without tokens are allowed.
        """
        self.array = array
        self._tokens, self._where, self._offset, self._empty = tokens, where, offset, empty

    def __len__(self) -> int:
        return len(self.array)

    def ends(self, start: int, stop: int) -> np.ndarray:
        refuse_shrunk(self.array, self._where)
        low, high = np.searchsorted(self.array, np.array([start, stop], dtype=np.uint64), side="right")
        ends = self.array[low:high]
        return ends if len(ends) < 2 or (ends[1:] != ends[:-1]).all() else np.unique(ends)

    def borders(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        refuse_shrunk(self.array, self._where)
        borders = borders_in(self.array, starts, length)
        return distinct(*borders) if self._empty else borders

    def faults(self, whole: bool) -> list[str]:
        faults: list[str] = []
        for start, stop in blocks_of(len(self.array), whole):
            before = self.array[start - 1 : start] if start else np.zeros(1, dtype=np.uint64)
            ends = np.concatenate([before, self.array[start:stop]])
            wrong = (ends[1:] < ends[:-1] if self._empty else ends[1:] <= ends[:-1]) | (ends[1:] > self._tokens)
            if wrong.any():
                place = int(np.argmax(wrong))
                faults.append(self._fault(start + place, int(ends[place]), int(ends[place + 1])))
        if not faults and int(self.array[-1]) != self._tokens:
            faults.append(f"{self._where}: documents end at token {int(self.array[-1])} of {self._tokens}")
        return faults

    def _fault(self, document: int, before: int, end: int) -> str:
        what = f"ends at token {end} of {self._tokens}" if end > self._tokens else "ends before it begins"
        what = "has no token" if end == before else what
        return f"{self._where} at byte {self._offset + 8 * document}: document {document} {what}"


def borders_in(ends: np.ndarray, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns `Source.borders` for a sorted uint64 array of document ends, which may be memory-mapped.

    It reads O(log documents) pages per window. Keys and array are both uint64, because numpy would otherwise convert the
    whole array first.
    """
    starts = starts.astype(np.uint64)
    low = np.searchsorted(ends, starts, side="right")
    high = np.searchsorted(ends, starts + np.uint64(length), side="right")
    counts = high - low
    rows = np.repeat(np.arange(len(starts)), counts)
    if not len(rows):
        return rows, rows.copy()
    places_in_ends = np.arange(len(rows)) + np.repeat(low - (np.cumsum(counts) - counts), counts)
    return rows, (ends[places_in_ends] - starts[rows]).astype(np.int64)


def blocks_of(count: int, whole: bool) -> list[tuple[int, int]]:
    """Returns [start, stop) of blocks that cover `count` entries, or of evenly spaced blocks of a large table."""
    if whole or count <= _WHOLE:
        return [(start, min(start + _PART, count)) for start in range(0, count, _PART)]
    starts = np.linspace(0, count - _BLOCK, CHECKED).astype(np.int64).tolist()
    return [(start, start + _BLOCK) for start in starts]


def distinct(rows: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the borders without repetitions."""
    same = (columns[1:] == columns[:-1]) & (rows[1:] == rows[:-1])
    if not same.any():
        return rows, columns
    new = np.concatenate([[True], ~same])
    return rows[new], columns[new]


class Listed:
    """Documents of shards that each have a table. No document crosses a shard. A table is checked before its first use."""

    def __init__(
        self,
        firsts: Sequence[int],
        table: Callable[[int], EndsTable],
        kept: int | None = None,
        *,
        remote: bool = False,
        advice: str = "restore the file",
    ) -> None:
        """
        Args:
            firsts: see `Shards.firsts`.
            table: opens the table of a shard.
            kept: maximum number of open tables.
            remote: tables must be downloaded completely, so none is checked before its first use.
            advice: what to do about a damaged table, for messages.

        Raises:
            DataError: a checked table does not ascend, or does not end with its shard; the message has file and byte.
        """
        self._firsts = np.array(firsts, dtype=np.uint64)
        self._open, self._advice = table, advice
        self.checked = True
        self._done: set[int] = set()
        self._tables = LRUCache(self._table, kept)
        count = len(self._firsts) - 1
        for number in () if remote else range(0, count, max(1, count // CHECKED)):
            self._table(number)

    def ends(self, start: int, stop: int) -> np.ndarray:
        parts = [np.empty(0, dtype=np.uint64)]
        for number in range(self._shard_of(start), len(self._firsts) - 1):
            first, after = int(self._firsts[number]), int(self._firsts[number + 1])
            if first >= stop:
                break
            parts.append(self._tables[number].ends(max(0, start - first), min(stop, after) - first) + np.uint64(first))
        return np.concatenate(parts)

    def borders(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        if len(self._firsts) == 2:
            return self._tables[0].borders(starts, length)
        starts = starts.astype(np.uint64)
        shards = np.searchsorted(self._firsts[1:-1], starts, side="right")
        crossing = starts + np.uint64(length) > self._firsts[shards + 1]
        rows, columns = [], []
        for number in np.unique(shards[~crossing]).tolist():
            own = np.flatnonzero((shards == number) & ~crossing)
            own_rows, own_columns = self._tables[number].borders(starts[own] - self._firsts[number], length)
            rows.append(own[own_rows])
            columns.append(own_columns)
        for row in np.flatnonzero(crossing).tolist():
            row_columns = (self.ends(int(starts[row]), int(starts[row]) + length) - starts[row]).astype(np.int64)
            rows.append(np.full(len(row_columns), row))
            columns.append(row_columns)
        return _by_row(rows, columns)

    def faults(self) -> list[str]:
        """Checks all tables completely and returns their faults."""
        return [fault for number in range(len(self._firsts) - 1) for fault in self._open(number).faults(whole=True)]

    def _table(self, number: int) -> EndsTable:
        table = self._open(number)
        if number not in self._done:
            if wrong := table.faults(whole=False):
                raise DataError(f"{wrong[0]}; {self._advice}")
            self._done.add(number)
            self.checked = self.checked and len(table) <= _WHOLE
        return table

    def _shard_of(self, token: int) -> int:
        return int(np.searchsorted(self._firsts[1:-1], np.uint64(max(0, token)), side="right"))


class Delimited:
    """Documents whose end or beginning is marked by a token. The tokens are read to find the ends.

    With `eos`, or without either, the end of a file also ends a document. With `bos` it does not, because writers that put
    a token before each document continue a document in the next file.
    """

    checked = True  # document ends follow from the tokens

    def __init__(self, shards: Shards, eos: int | None = None, bos: int | None = None) -> None:
        self._shards = shards
        self._eos, self._bos = eos, bos
        self._files = np.array(shards.firsts[1:] if bos is None else [shards.tokens], dtype=np.uint64)

    def ends(self, start: int, stop: int) -> np.ndarray:
        stop = min(stop, self._shards.tokens)
        low, high = np.searchsorted(self._files, np.array([start, stop], dtype=np.uint64), side="right")
        ends = self._files[low:high].astype(np.int64)
        if self._eos is not None:
            marked = np.flatnonzero(self._shards.read(start, stop) == self._eos) + (start + 1)
            ends = np.union1d(marked, ends) if len(ends) else marked
        elif self._bos is not None and stop > start:
            after = self._shards.read(start + 1, min(stop + 1, self._shards.tokens))
            marked = np.flatnonzero(after == self._bos) + (start + 1)
            ends = np.union1d(marked, ends) if len(ends) else marked
        return ends.astype(np.uint64)

    def borders(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        rows, columns = borders_in(self._files, starts, length)
        delimiter, ahead = (self._eos, 0) if self._eos is not None else (self._bos, 1)
        if delimiter is None:
            return rows, columns
        places = np.flatnonzero(self._marked(starts.astype(np.int64) + ahead, length, delimiter))
        if len(rows):
            places = np.union1d(places, rows * length + columns - 1)
        rows, columns = np.divmod(places, length)
        return rows, columns + 1

    def _marked(self, starts: np.ndarray, length: int, delimiter: int) -> np.ndarray:
        """Returns (N, length) bool: whether each token is the delimiter; False after the last token."""
        total = self._shards.tokens
        if int(starts.max(initial=0)) <= total - length:
            return self._shards.windows(starts, length) == delimiter
        marked = np.zeros((len(starts), length), dtype=bool)
        for row, start in enumerate(starts.tolist()):
            tokens = self._shards.read(min(start, total), min(start + length, total))
            marked[row, : len(tokens)] = tokens == delimiter
        return marked


def _by_row(rows: list[np.ndarray], columns: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    empty = np.empty(0, dtype=np.int64)
    joined, flat = np.concatenate([*rows, empty]), np.concatenate([*columns, empty])
    order = np.argsort(joined, kind="stable")
    return joined[order], flat[order]
