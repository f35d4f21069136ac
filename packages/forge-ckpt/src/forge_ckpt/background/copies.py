"""Copies of tensors in memory that two processes share. Needs no torch."""

import mmap
import os
import tempfile
from collections.abc import Generator, Sequence
from itertools import accumulate

from forge_ckpt.format.elements import CHUNK_BYTES
from forge_ckpt.format.rank_file import RankFile


class SharedMemory:
    """Bytes without a name, known to the processes that have its descriptor; it grows and never shrinks.

    Args:
        descriptor: of memory that another process made; None makes some.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _anonymous() if descriptor is None else descriptor
        self._view = memoryview(b"")

    @property
    def size(self) -> int:
        """Bytes that this process sees."""
        return len(self._view)

    def grow(self, size: int) -> None:
        """At least `size` bytes; each of them is there afterwards, so that no copy waits for it.

        Raises:
            OSError: there is not enough memory.
        """
        if size > self.size:
            if os.fstat(self.descriptor).st_size < size:
                take = os.posix_fallocate if hasattr(os, "posix_fallocate") else _lengthen
                take(self.descriptor, 0, size)
            self._attach(size)

    def view(self, size: int) -> memoryview:
        """The first `size` bytes."""
        if size > self.size:
            self._attach(size)
        return self._view[:size]

    def file(self, lengths: Sequence[int], begin: int = 0) -> RankFile:
        """Pieces that lie in it back to back, from byte `begin` on."""

        def source() -> Generator[memoryview]:
            with self.view(begin + sum(lengths)) as whole:
                start = begin
                for end in accumulate(lengths, initial=begin):
                    for at in range(start, end, CHUNK_BYTES):
                        with whole[at : min(at + CHUNK_BYTES, end)] as chunk:
                            yield chunk
                    start = end

        return RankFile(lengths, source)

    def close(self) -> None:
        """This process no longer uses it."""
        self._view = memoryview(b"")
        os.close(self.descriptor)

    def _attach(self, size: int) -> None:
        # A view that is still in use keeps the map that it is of. Pages are mapped now; a first copy that has to touch them takes
        # five times as long.
        self._view = memoryview(mmap.mmap(self.descriptor, size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)))


def files_in(memory: SharedMemory, moving: Sequence[int], frozen: Sequence[int]) -> tuple[RankFile | None, RankFile | None]:
    """The two files of a draft whose pieces lie in memory one after the other; None for one without a piece."""
    first = memory.file(moving) if moving else None
    return first, memory.file(frozen, sum(moving)) if frozen else None


def _anonymous() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("forge-checkpoint", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # not Linux: a file without a name
        return os.dup(file.fileno())


def _lengthen(descriptor: int, start: int, size: int) -> None:
    """As `os.posix_fallocate`, where a system has none; bytes come to be when they are written."""
    os.ftruncate(descriptor, start + size)
