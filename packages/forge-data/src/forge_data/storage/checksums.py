"""What files hold: a fingerprint from samples, and checksums of whole files, compared during the first epoch.

A fingerprint covers sizes, both ends of every file, and samples; modification times are left out because copying changes
them. Small contents are read whole. Of large ones a change that keeps every size and lies between the samples is not seen.
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
"""Files on this machine are read whole up to this many bytes together."""
EDGE = 4096
"""Bytes that are read at both ends of each file of a larger corpus."""
_SAMPLES, _SAMPLE_BLOCK = 512, 1 << 14
TOKEN_BLOCKS, TOKEN_BLOCK = 64, 4096
"""Number and length of the blocks of token ids that are read, besides head and tail."""
_READ_BLOCK = 1 << 23


def digest_of(files: Sequence[File], identity: str = "", blocks: int = _SAMPLES, block: int = _SAMPLE_BLOCK) -> str:
    """Of names, sizes and content of files, in their order.

    A remote file whose server names its content (an etag, a checksum) is known by that, and not read.

    Args:
        files: whose content is identified.
        identity: anything else that the fingerprint depends on.
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
    wanted: list[list[tuple[int, int]]] = [[(0, file.size)] if whole else edge_ranges(file.size) for file in unnamed]
    for start, stop in () if whole else sampled_ranges(total, block, blocks):
        for number in range(int(np.searchsorted(firsts, start, side="right")) - 1, len(unnamed)):
            if firsts[number] >= stop:
                break
            first, size = int(firsts[number]), unnamed[number].size
            wanted[number].append((max(0, start - first), min(size, stop - first)))
    for found in _digests(unnamed, wanted):
        digest.update(found)
    return digest.hexdigest()


def sampled_ranges(total: int, block: int, blocks: int) -> list[tuple[int, int]]:
    """[start, stop) of what is read of `total` bytes or tokens: all of little, else head, tail, and one block in each of
    `blocks` equal stretches, at a place that looks random and follows from the size alone."""
    if total <= block * max(2, blocks):
        return [(0, total)]
    stretch = (total - block) // max(1, blocks)
    numbers = np.arange(blocks, dtype=np.uint64)
    inside = mix(numbers + mix(np.array([total], dtype=np.uint64))) % np.uint64(max(1, stretch - block))
    starts = (numbers * np.uint64(stretch) + inside).tolist()
    return [(0, block), *((start, start + block) for start in starts), (total - block, total)]


def edge_ranges(size: int) -> list[tuple[int, int]]:
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


class Checksum(NamedTuple):
    """What a file must hold: its XXH3-128, and the tokens of the source before it."""

    before: int
    path: Path
    xxh3: str


def fault_of(path: Path, xxh3: str, stop: threading.Event | None = None) -> str | None:
    """Reads a file and says how it differs from its checksum; None when it does not, or when asked to stop."""
    digest, block = xxhash.xxh3_128(), bytearray(_READ_BLOCK)
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(block):
                digest.update(memoryview(block)[:count])
                if stop is not None and stop.is_set():
                    return None
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    found = digest.hexdigest()
    return None if found == xxh3 else f"{path}: content differs from its checksum ({found}, not {xxh3})"


class FirstEpoch:
    """One thread that compares this rank's share of the files with their checksums while a run reads them for the first time.

    A file is due when the run has read as many tokens of its source as lie before it, in any order: so every file is compared
    once, at the pace of the first epoch, and a resume goes on where the run was.

    A source takes part by a method `checksums()` that gives a list of `Checksum`, in the order of the stream.
    """

    def __init__(self, sources: Mapping[str, Any], drawn: Mapping[str, int], rank: int, ranks: int) -> None:
        """
        Args:
            sources: by label.
            drawn: tokens of each source that the run has read before.
            rank, ranks: file i belongs to rank i mod ranks.
        """
        self._due: dict[str, list[Checksum]] = {}
        for label, source in sources.items():
            if not hasattr(source, "checksums") or drawn[label] >= source.tokens:
                continue
            listed: Sequence[Checksum] = source.checksums()
            places = [entry.before for entry in listed]
            # The file that the run was in was perhaps not compared to its end.
            begun = places[max(0, bisect_right(places, drawn[label]) - 1)]
            if own := [entry for entry in listed[rank::ranks] if entry.before >= begun]:
                self._due[label] = own[::-1]
        self._queue: SimpleQueue[Checksum | None] = SimpleQueue()
        self._stop = threading.Event()
        self._faults: list[str] = []
        self._thread: threading.Thread | None = None

    def reached(self, drawn: Mapping[str, int]) -> None:
        """Compares the files that are due after this many tokens of each source.

        Raises:
            DataError: one that was compared differs.
        """
        if self._faults:
            raise DataError(
                f"{self._faults[0]}; the run may have read it: restore it or write the store again, and go back to a checkpoint "
                "from before it was damaged"
            )
        for label, due in list(self._due.items()):
            while due and due[-1].before <= drawn[label]:
                self._compare(due.pop())
            if not due:
                del self._due[label]
                if not self._due:
                    self._queue.put(None)

    def close(self) -> None:
        """Ends the thread, which may be in the middle of a file."""
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
