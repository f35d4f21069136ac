"""Where documents end: as an index lists it, or after (or before) a token that marks it."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from forge_core.errors import DataError
from forge_data.storage.shards import LRUCache, Shards, refuse_shrunk

CHECKED = 32
"""So many tables of a corpus are opened and compared with themselves when it is; the others when they are first needed."""
_WHOLE = 1 << 23
"""Of a table with more documents `CHECKED` blocks are; what lies between them is checked as rows are cut."""
_BLOCK, _PART = 4096, 1 << 18


class Documents(Protocol):
    """Document ends of a stream; see `Source.ends` and `Source.borders`.

    Attributes:
        checked: all that was used so far was compared as a whole; else rows are looked at one by one.
    """

    checked: bool

    def ends(self, start: int, stop: int) -> np.ndarray: ...

    def borders(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]: ...


class EndsTable(Protocol):
    """Document ends of one shard, counted from its start."""

    def ends(self, start: int, stop: int) -> np.ndarray: ...

    def borders(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]: ...

    def __len__(self) -> int:
        """What there is to check: documents, or sequences of them."""
        ...

    def faults(self, whole: bool) -> list[str]:
        """What is wrong, with file and byte: of all documents, or of a large table only in blocks of them."""
        ...


class Ends:
    """A table that is an ascending array of uint64, which may be memory-mapped.

    A document without a token ends where the one before it ended: that is one border.
    """

    def __init__(self, array: np.ndarray, tokens: int, where: str, offset: int = 0, empty: bool = True) -> None:
        """
        Args:
            array: (documents,) ends.
            tokens: of the shard, where the last document ends.
            where: the file, for messages.
            offset: bytes in it before the first end.
            empty: documents without a token are allowed.
        """
        self.array = array
        self._tokens, self._where, self._offset, self._empty = tokens, where, offset, empty

    def __len__(self) -> int:
        return len(self.array)

    def ends(self, start: int, stop: int) -> np.ndarray:
        refuse_shrunk(self.array, self._where)
        low, high = np.searchsorted(self.array, np.array([start, stop], dtype=np.uint64), side="right")
        found = self.array[low:high]
        return found if len(found) < 2 or (found[1:] != found[:-1]).all() else np.unique(found)

    def borders(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        refuse_shrunk(self.array, self._where)
        found = borders_in(self.array, starts, length)
        return distinct(*found) if self._empty else found

    def faults(self, whole: bool) -> list[str]:
        found: list[str] = []
        for start, stop in blocks_of(len(self.array), whole):
            before = self.array[start - 1 : start] if start else np.zeros(1, dtype=np.uint64)
            ends = np.concatenate([before, self.array[start:stop]])
            wrong = (ends[1:] < ends[:-1] if self._empty else ends[1:] <= ends[:-1]) | (ends[1:] > self._tokens)
            if wrong.any():
                place = int(np.argmax(wrong))
                found.append(self._fault(start + place, int(ends[place]), int(ends[place + 1])))
        if not found and int(self.array[-1]) != self._tokens:
            found.append(f"{self._where}: documents end at token {int(self.array[-1])} of {self._tokens}")
        return found

    def _fault(self, document: int, before: int, end: int) -> str:
        what = f"ends at token {end} of {self._tokens}" if end > self._tokens else "ends before it begins"
        what = "has no token" if end == before else what
        return f"{self._where} at byte {self._offset + 8 * document}: document {document} {what}"


def borders_in(ends: np.ndarray, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """`Source.borders` from a sorted uint64 array of document ends, which may be memory-mapped.

    Touches O(log documents) pages per window: both sides of the search are uint64, else numpy would convert the whole
    array first.
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
    """[start, stop) of blocks of `count` things: of all of them, or of evenly spaced ones where there are very many."""
    if whole or count <= _WHOLE:
        return [(start, min(start + _PART, count)) for start in range(0, count, _PART)]
    starts = np.linspace(0, count - _BLOCK, CHECKED).astype(np.int64).tolist()
    return [(start, start + _BLOCK) for start in starts]


def distinct(rows: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Borders without those that are the same as the one before."""
    same = (columns[1:] == columns[:-1]) & (rows[1:] == rows[:-1])
    if not same.any():
        return rows, columns
    new = np.concatenate([[True], ~same])
    return rows[new], columns[new]


class Listed:
    """Documents of shards that each have a table; none crosses a shard. A table is checked before it is used."""

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
            kept: tables that stay open.
            remote: a table has to be fetched as a whole, so none is checked before it is needed.
            advice: what to do about a damaged table.

        Raises:
            DataError: a table that was looked at does not ascend, or ends elsewhere than its shard; with file and byte.
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
            places, found = self._tables[number].borders(starts[own] - self._firsts[number], length)
            rows.append(own[places])
            columns.append(found)
        for row in np.flatnonzero(crossing).tolist():
            found = (self.ends(int(starts[row]), int(starts[row]) + length) - starts[row]).astype(np.int64)
            rows.append(np.full(len(found), row))
            columns.append(found)
        return _by_row(rows, columns)

    def faults(self) -> list[str]:
        """Everything that is wrong with all tables."""
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
    """Documents that a token ends or begins; found by reading the tokens in between.

    With `eos`, or without either, the end of a file ends a document too. With `bos` it does not: writers that put a
    token before each document go on with a document in the next file.
    """

    checked = True  # they follow from the tokens

    def __init__(self, shards: Shards, eos: int | None = None, bos: int | None = None) -> None:
        self._shards = shards
        self._eos, self._bos = eos, bos
        self._files = np.array(shards.firsts[1:] if bos is None else [shards.tokens], dtype=np.uint64)

    def ends(self, start: int, stop: int) -> np.ndarray:
        stop = min(stop, self._shards.tokens)
        low, high = np.searchsorted(self._files, np.array([start, stop], dtype=np.uint64), side="right")
        found = self._files[low:high].astype(np.int64)
        if self._eos is not None:
            marked = np.flatnonzero(self._shards.read(start, stop) == self._eos) + (start + 1)
            found = np.union1d(marked, found) if len(found) else marked
        elif self._bos is not None and stop > start:
            after = self._shards.read(start + 1, min(stop + 1, self._shards.tokens))
            marked = np.flatnonzero(after == self._bos) + (start + 1)
            found = np.union1d(marked, found) if len(found) else marked
        return found.astype(np.uint64)

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
        """(N, length) whether a token is the delimiter; none is behind the last token."""
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
