"""What files hold, as one number: sizes, both ends of every file, and samples; no time, for a copy and `touch` change that too.

Small contents are read whole. Of large ones a change that keeps every size and lies between the samples is not seen.
"""

from collections.abc import Sequence

import numpy as np
import xxhash

from forge_data.order.permutation import mix
from forge_data.storage.file import File
from forge_data.storage.files import read_bytes
from forge_data.storage.latency import read_each

WHOLE = 1 << 26
"""Files on this machine of at most so many bytes together are read whole."""
EDGE = 4096
"""Bytes at both ends of each file that are read otherwise."""
_SAMPLES, _SAMPLE_BLOCK = 512, 1 << 14
TOKEN_BLOCKS, TOKEN_BLOCK = 64, 4096
"""Of token ids head, tail and so many blocks of so many ids are read."""


def digest_of(files: Sequence[File], identity: str = "", blocks: int = _SAMPLES, block: int = _SAMPLE_BLOCK) -> str:
    """Of names, sizes and content of files, in their order.

    A remote file whose server names its content (an etag, a checksum) is known by that, and not read.

    Args:
        files: in question.
        identity: of what else there is to tell apart.
        blocks: samples that are read of all together, where they are large.
        block: bytes of one.

    Raises:
        DataError: a file cannot be read.
    """
    digest = xxhash.xxh3_128(identity.encode())
    for file in files:
        digest.update(f"{file.name}\0{file.size}\0{file.stamp if file.tagged else ''}\n".encode())
    unnamed = [file for file in files if not file.tagged and file.size]
    firsts = np.cumsum([0, *(file.size for file in unnamed)])
    total = int(firsts[-1])
    whole = total <= WHOLE and not any(file.remote for file in unnamed)
    wanted: list[list[tuple[int, int]]] = [[(0, file.size)] if whole else edges(file.size) for file in unnamed]
    for start, stop in () if whole else places(total, block, blocks):
        for number in range(int(np.searchsorted(firsts, start, side="right")) - 1, len(unnamed)):
            if firsts[number] >= stop:
                break
            first, size = int(firsts[number]), unnamed[number].size
            wanted[number].append((max(0, start - first), min(size, stop - first)))
    for found in _digests(unnamed, wanted):
        digest.update(found)
    return digest.hexdigest()


def places(total: int, block: int, blocks: int) -> list[tuple[int, int]]:
    """[start, stop) of what is read of `total` bytes or tokens: all of little, else head, tail, and one block in each of
    `blocks` equal stretches, at a place that looks random and follows from the size alone."""
    if total <= block * max(2, blocks):
        return [(0, total)]
    stretch = (total - block) // max(1, blocks)
    numbers = np.arange(blocks, dtype=np.uint64)
    inside = mix(numbers + mix(np.array([total], dtype=np.uint64))) % np.uint64(max(1, stretch - block))
    starts = (numbers * np.uint64(stretch) + inside).tolist()
    return [(0, block), *((start, start + block) for start in starts), (total - block, total)]


def edges(size: int) -> list[tuple[int, int]]:
    """[start, stop) of the head and the tail of a file, or of all of a short one."""
    return [(0, size)] if size <= 2 * EDGE else [(0, EDGE), (size - EDGE, size)]


def _digests(files: Sequence[File], wanted: Sequence[Sequence[tuple[int, int]]]) -> list[bytes]:
    """A digest of the wanted pieces of every file."""

    def one(number: int) -> bytes:
        digest = xxhash.xxh3_128()
        for start, stop in wanted[number]:
            digest.update(read_bytes(files[number], start, stop))
        return digest.digest()

    return read_each(one, range(len(files)))
