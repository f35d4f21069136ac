"""Compares the files of token stores with their checksums while a run reads them for the first time.

A file is due when the run has read as many tokens of its source as lie before it, in any order: so
every file is compared once, at the pace of the first epoch, and a resume goes on where the run was.
"""

import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import xxhash

from forge_core.errors import DataError

_READ_BLOCK = 1 << 23


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
    """One thread that compares this rank's share of the files.

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
        """Has files compared that are due after so many tokens of each source.

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
