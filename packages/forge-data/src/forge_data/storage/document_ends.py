"""Document ends: listed by an index, or marked by a token that ends or begins each document."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from forge_core.errors import DataError
from forge_data.storage.shards import LRUCache, Shards, refuse_shrunk

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
