"""Every change is made in both stores, first in the first one. A file is read from the first store that has it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from forge_core.protocols import Store

CHUNK = 1 << 24
Found = TypeVar("Found")


class MirrorStore:
    """Implements `forge_core.protocols.Store`."""

    def __init__(self, first: Store, second: Store) -> None:
        self._first, self._second = first, second

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        self._first.write(path, chunks)
        self._second.write(path, self._chunks(path))  # read back, because a chunk's memory is reused for the next one

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        return self._of_either(lambda store: store.read(path, offset, length))

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        self._of_either(lambda store: store.read_into(path, offset, buffer))

    def size(self, path: str) -> int:
        return self._of_either(lambda store: store.size(path))

    def free(self) -> int | None:
        """Returns the free space of the store that has less."""
        known = [space for store in (self._first, self._second) if (space := store.free()) is not None]
        return min(known, default=None)

    def rename(self, source: str, target: str) -> None:
        held = [store for store in (self._first, self._second) if self._has(store, source)]
        for store in held or (self._first,):  # the first store raises the error for a missing source
            store.rename(source, target)

    def list(self, path: str = "") -> Sequence[str]:
        return sorted({*self._first.list(path), *self._second.list(path)})

    def remove(self, path: str) -> None:
        self._first.remove(path)
        self._second.remove(path)

    def _chunks(self, path: str) -> Iterator[bytes]:
        for offset in range(0, size := self._first.size(path), CHUNK):
            yield self._first.read(path, offset, min(CHUNK, size - offset))

    def _of_either(self, read: Callable[[Store], Found]) -> Found:
        try:
            return read(self._first)
        except FileNotFoundError:
            return read(self._second)

    @staticmethod
    def _has(store: Store, path: str) -> bool:
        folder, _, name = path.rpartition("/")
        return name in store.list(folder)
