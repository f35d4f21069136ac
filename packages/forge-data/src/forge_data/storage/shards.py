"""Token ids of many files as one stream. A file is mapped at its first read; a limited number stays mapped."""

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
