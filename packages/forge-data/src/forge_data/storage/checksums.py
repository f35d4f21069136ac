"""Fingerprints of files from samples, and checksums of whole files, which are verified during the first epoch.

A fingerprint covers sizes, head and tail of every file, and samples; modification times are left out because copying changes
them. Small corpora are read completely. In large ones, a change between the samples that keeps all sizes is not detected.
"""

import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import xxhash

from forge_core.errors import DataError
from forge_data.order.permutation import mix
from forge_data.storage.files import File, read_bytes, read_each

WHOLE = 1 << 26
"""Total size in bytes up to which local files are read completely."""
EDGE = 4096
"""Bytes read at the head and at the tail of each file of a larger corpus."""
_SAMPLES, _SAMPLE_BLOCK = 512, 1 << 14
TOKEN_BLOCKS, TOKEN_BLOCK = 64, 4096
"""Number and length of the sampled blocks of token ids, besides head and tail."""
_READ_BLOCK = 1 << 23


def digest_of(files: Sequence[File], identity: str = "", blocks: int = _SAMPLES, block: int = _SAMPLE_BLOCK) -> str:
    """Returns a digest of names, sizes and content of files, in their order.

    A remote file with an ETag or a checksum is identified by it and not read.

    Args:
        files: the files to identify.
        identity: further text that the fingerprint depends on.
        blocks: number of samples of a large corpus.
        block: bytes per sample.

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
    wanted: list[list[tuple[int, int]]] = [[(0, file.size)] if whole else edge_ranges(file.size) for file in unnamed]
    for start, stop in () if whole else sampled_ranges(total, block, blocks):
        for number in range(int(np.searchsorted(firsts, start, side="right")) - 1, len(unnamed)):
            if firsts[number] >= stop:
                break
            first, size = int(firsts[number]), unnamed[number].size
            wanted[number].append((max(0, start - first), min(size, stop - first)))
    for file_digest in _digests(unnamed, wanted):
        digest.update(file_digest)
    return digest.hexdigest()


def sampled_ranges(total: int, block: int, blocks: int) -> list[tuple[int, int]]:
    """Returns the ranges [start, stop) that are sampled from `total` bytes or tokens.

    A short corpus is read completely; else head, tail, and one block in each of `blocks` equal stretches, at a pseudo-random
    position that depends only on `total`.
    """
    if total <= block * max(2, blocks):
        return [(0, total)]
    stretch = (total - block) // max(1, blocks)
    numbers = np.arange(blocks, dtype=np.uint64)
    inside = mix(numbers + mix(np.array([total], dtype=np.uint64))) % np.uint64(max(1, stretch - block))
    starts = (numbers * np.uint64(stretch) + inside).tolist()
    return [(0, block), *((start, start + block) for start in starts), (total - block, total)]


def edge_ranges(size: int) -> list[tuple[int, int]]:
    """Returns [start, stop) of the head and the tail of a file, or of all of a short file."""
    return [(0, size)] if size <= 2 * EDGE else [(0, EDGE), (size - EDGE, size)]


def _digests(files: Sequence[File], wanted: Sequence[Sequence[tuple[int, int]]]) -> list[bytes]:
    """Returns one digest per file, of its wanted ranges."""

    def digest_file(number: int) -> bytes:
        digest = xxhash.xxh3_128()
        for start, stop in wanted[number]:
            digest.update(read_bytes(files[number], start, stop))
        return digest.digest()

    return read_each(digest_file, range(len(files)))


class Checksum(NamedTuple):
    """Expected XXH3-128 of a file; `before` is the number of tokens of the source before this file."""

    before: int
    path: Path
    xxh3: str


def fault_of(path: Path, xxh3: str, stop: threading.Event | None = None) -> str | None:
    """Returns why a file does not match its checksum; None if it matches, or if `stop` was set meanwhile."""
    digest, block = xxhash.xxh3_128(), bytearray(_READ_BLOCK)
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(block):
                digest.update(memoryview(block)[:count])
                if stop is not None and stop.is_set():
                    return None
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    actual = digest.hexdigest()
    return None if actual == xxh3 else f"{path}: content differs from its checksum ({actual}, not {xxh3})"


class FirstEpoch:
    """A thread that verifies the checksums of this rank's share of the files during the first epoch.

    A file is due once the run has read as many tokens of the source, in any order, as precede the file. So every file is
    verified once, at the pace of the first epoch, and a resume continues where the run stopped.

    Sources with a method `checksums()` take part. It returns a list of `Checksum` in the order of the stream.
    """

    def __init__(self, sources: Mapping[str, Any], drawn: Mapping[str, int], rank: int, ranks: int) -> None:
        """
        Args:
            sources: sources by label.
            drawn: tokens of each source that the run has already read.
            rank, ranks: file i is verified by rank i mod ranks.
        """
        self._due: dict[str, list[Checksum]] = {}
        for label, source in sources.items():
            if not hasattr(source, "checksums") or drawn[label] >= source.tokens:
                continue
            listed: Sequence[Checksum] = source.checksums()
            places = [entry.before for entry in listed]
            # The file that was being read may not have been verified completely.
            begun = places[max(0, bisect_right(places, drawn[label]) - 1)]
            if own := [entry for entry in listed[rank::ranks] if entry.before >= begun]:
                self._due[label] = own[::-1]
        self._queue: SimpleQueue[Checksum | None] = SimpleQueue()
        self._stop = threading.Event()
        self._faults: list[str] = []
        self._thread: threading.Thread | None = None

    def reached(self, drawn: Mapping[str, int]) -> None:
        """Queues the files that are due after this many tokens of each source.

        Raises:
            DataError: a file verified so far does not match its checksum.
        """
        if self._faults:
            raise DataError(
                f"{self._faults[0]}; the run may have read the damaged file: restore it or write the store again, and resume "
                "from a checkpoint that was written before the damage"
            )
        for label, due in list(self._due.items()):
            while due and due[-1].before <= drawn[label]:
                self._compare(due.pop())
            if not due:
                del self._due[label]
                if not self._due:
                    self._queue.put(None)

    def close(self) -> None:
        """Stops the thread, even in the middle of a file."""
        self._stop.set()
        self._queue.put(None)

    def _compare(self, entry: Checksum) -> None:
        self._queue.put(entry)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="checksums", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while (entry := self._queue.get()) is not None and not self._stop.is_set():
            if fault := fault_of(entry.path, entry.xxh3, self._stop):
                self._faults.append(fault)
