"""The bytes of one rank's pieces on their way into a file, and the checksum of each. Needs no torch.

A rank file has no header. The manifest says which pieces it holds, in order; a piece's length follows from its box and
dtype and its place from the lengths before it, so no two statements about a file can contradict each other.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing

import xxhash

from forge_core.protocols.checkpoint import Store


class RankFile:
    """Pieces back to back; iterating writes `checksums` (xxh3_128), iterating again starts anew.

    Args:
        lengths: bytes of each piece.
        source: the bytes of all of them in order, in chunks that hold bytes of one piece each. A chunk is of use until the next
            one is asked for.
    """

    def __init__(self, lengths: Sequence[int], source: Callable[[], Generator[memoryview]]) -> None:
        self.lengths = lengths
        self.checksums: list[bytes] = []
        self._source = source

    def chunks(self) -> Generator[memoryview]:
        """The bytes without their checksums."""
        return self._source()

    def read(self) -> None:
        """Makes the checksums without writing anything."""
        for _ in self:
            pass

    def __iter__(self) -> Iterator[memoryview]:
        self.checksums = []
        with closing(self._source()) as chunks:
            for length in self.lengths:
                digest = xxhash.xxh3_128()
                while length:
                    chunk = next(chunks)
                    length -= len(chunk)  # it is released after the yield
                    digest.update(chunk)
                    yield chunk
                self.checksums.append(digest.digest())


def checksum(store: Store, path: str, start: int, length: int, buffer: memoryview) -> bytes:
    """xxh3_128 of a range of a file, read through `buffer`."""
    digest = xxhash.xxh3_128()
    for offset in range(0, length, len(buffer)):
        part = buffer[: min(len(buffer), length - offset)]
        store.read_into(path, start + offset, part)
        digest.update(part)
    return digest.digest()
