"""Token ids of many files as one stream. A file is mapped when it is first read; a limited number stays mapped."""

import mmap
import os
import resource
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, TypeVar

import numpy as np

from forge_core.errors import DataError
from forge_data.storage.files import File, local_path, read_bytes

Thing = TypeVar("Thing")
READS = 64
"""A mapped file's size is checked once per this many reads, and whenever windows of it are cut: the check costs more than
a read."""


@dataclass(frozen=True)
class Shard:
    """One file of token ids: `tokens` of them, after `offset` bytes of something else."""

    file: File
    tokens: int
    offset: int = 0


class LRUCache(Generic[Thing]):
    """Opens things by number and keeps the last ones: a mapped file holds a descriptor, and those are few."""

    def __init__(self, make: Callable[[int], Thing], limit: int | None = None) -> None:
        self._make = make
        self._limit = limit or open_files()
        self._things: dict[int, Thing] = {}

    def __getitem__(self, number: int) -> Thing:
        # Without a lock: the worst that two threads can do to each other is to open the same file twice.
        thing = self._things.pop(number, None)
        if thing is None:
            thing = self._make(number)
            while len(self._things) >= self._limit:
                self._things.pop(next(iter(self._things)), None)
        self._things[number] = thing
        return thing

    def __getstate__(self) -> dict[str, Any]:
        """Another process opens its own: a copied map would be a copy of the file."""
        return self.__dict__ | {"_things": {}}


class _Unshrunk:
    """The mapped files of a stream, asked for their size each time."""

    def __init__(self, stream: "Shards") -> None:
        self._stream = stream

    def __getitem__(self, number: int) -> np.ndarray:
        tokens = self._stream._data[number]
        refuse_shrunk(tokens, self._stream.shards[number].file.where)
        return tokens


class Shards:
    """Random access to the stream.

    Attributes:
        shards: in the order of the stream.
        dtype: of every shard.
        tokens: of all together.
        firsts: stream position of each shard's first token, and `tokens` as the last entry.
        remote: whether a file has to be fetched before it can be mapped.
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
        """Token ids [start, stop): a view of the mapped file where they lie in one shard."""
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
        """(N, length) token ids: what `read` gives from each of `starts` (N,) on."""
        if not len(starts):
            return np.empty((0, length), self.dtype)
        starts = starts.astype(np.int64)
        if not 0 <= int(starts.min()) <= int(starts.max()) <= self.tokens - length:
            raise IndexError(f"{length} tokens from {starts.min()} or {starts.max()} on are not inside the {self.tokens} tokens")
        if self._only:
            return _gathered(self._unshrunk[0], starts, length)
        found = np.empty((len(starts), length), self.dtype)
        numbers = np.searchsorted(self._inner, starts, side="right")
        whole = starts + length <= self._after[numbers]
        for number in np.unique(numbers[whole]).tolist():
            own = np.flatnonzero((numbers == number) & whole)
            found[own] = _gathered(self._unshrunk[number], starts[own] - self.firsts[number], length)
        for row in np.flatnonzero(~whole).tolist():
            found[row] = self.read(int(starts[row]), int(starts[row]) + length)
        return found

    def shard_of(self, token: int) -> int:
        """Number of the shard that holds a token; the last one for the end of the stream."""
        return min(bisect_right(self.firsts, token) - 1, len(self.shards) - 1)

    def place(self, token: int) -> str:
        """File and byte offset of a token, for messages."""
        number = self.shard_of(token)
        shard = self.shards[number]
        return f"{shard.file.where} at byte {shard.offset + (token - self.firsts[number]) * self.dtype.itemsize}"

    def peek(self, start: int, stop: int) -> np.ndarray:
        """As `read`, without fetching remote files as a whole."""
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
    """Windows of a shard, in one pass of numpy over all of them: a call for each costs several times what it copies."""
    step = tokens.itemsize
    overlapping = np.ndarray((len(tokens) - length + 1, length), tokens.dtype, tokens, strides=(step, step))
    return overlapping[starts]


def map_file(file: File, dtype: np.dtype, count: int, offset: int = 0) -> np.ndarray:
    """(count,) read-only view of a file's bytes after `offset`.

    Raises:
        DataError: the file is shorter than that, or cannot be opened.
    """
    size = offset + count * dtype.itemsize
    if not count:
        return np.empty(0, dtype)
    try:
        with local_path(file).open("rb") as content:
            found = os.fstat(content.fileno()).st_size
            if found < size:
                raise DataError(f"{file.where} is truncated: it ends at byte {found}, {size} are needed; restore the file")
            # np.memmap costs three times as much to make, and a microsecond more for every slice.
            return np.frombuffer(mmap.mmap(content.fileno(), size, access=mmap.ACCESS_READ), dtype, count, offset)
    except OSError as error:
        raise DataError(f"{file.where} cannot be read: {error.strerror}") from error


def refuse_shrunk(array: np.ndarray, where: str) -> None:
    """Refuses a mapped file that was cut off since: what is gone reads as zeros, or ends the process by SIGBUS.

    What happens between the question and the read cannot be seen.

    Raises:
        DataError: it is shorter than what is mapped.
    """
    base = array.base
    if isinstance(base, memoryview):
        mapping: Any = base.obj
        if (size := mapping.size()) < len(mapping):
            raise DataError(
                f"{where} was truncated to {size} bytes while it was read, {len(mapping)} are needed; restore the file. Write "
                "a changed file under another name"
            )


def open_files() -> int:
    """How many files one stream keeps mapped: an eighth of what this process may have open, at most 1,024."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1024 if limit == resource.RLIM_INFINITY else max(8, min(1024, limit // 8))
