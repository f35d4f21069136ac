"""Where documents end: as an index lists it, or after (or before) a token that marks it."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from forge_data.packing import borders_in
from forge_data.sources.shards import Kept, Shards


class Documents(Protocol):
    """Document ends of a stream; see `Source.ends` and `Source.borders`."""

    def ends(self, start: int, stop: int) -> np.ndarray: ...

    def borders(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]: ...


class Table(Protocol):
    """Document ends of one shard, counted from its start."""

    def ends(self, start: int, stop: int) -> np.ndarray: ...

    def borders(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]: ...


class Ends:
    """A table that is an ascending array of uint64, which may be memory-mapped."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def ends(self, start: int, stop: int) -> np.ndarray:
        low, high = np.searchsorted(self.array, np.array([start, stop], dtype=np.uint64), side="right")
        return self.array[low:high]

    def borders(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        return borders_in(self.array, starts, length)


class Listed:
    """Documents of shards that each have a table; none crosses a shard."""

    def __init__(self, firsts: Sequence[int], table: Callable[[int], Table], kept: int | None = None) -> None:
        """
        Args:
            firsts: see `Shards.firsts`.
            table: opens the table of a shard.
            kept: tables that stay open.
        """
        self._firsts = np.array(firsts, dtype=np.uint64)
        self._tables = Kept(table, kept)

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

    def _shard_of(self, token: int) -> int:
        return int(np.searchsorted(self._firsts[1:-1], np.uint64(max(0, token)), side="right"))


class Delimited:
    """Documents that a token ends or begins; found by reading the tokens in between.

    With `eos`, or without either, the end of a file ends a document too. With `bos` it does not: writers that put a
    token before each document go on with a document in the next file.
    """

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
