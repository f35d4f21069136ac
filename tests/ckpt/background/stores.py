"""Stores for savers in other processes: what they do is told by files, since nothing else reaches them."""

import errno
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from forge_ckpt.store.local import LocalStore


class Told(LocalStore):
    """Does what files next to it say when a file of a rank is written.

    `gate`: waits until it is gone, and says so with `waiting`. `full-N`: no space for the file of rank N. `kill-N`: the process
    dies there. `at`, a number: it dies before that operation of all that change the disk.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path / "store", probe=self._count)
        self.told, self.done = path, 0

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        rank = path.rpartition("rank-")[2][:5]
        if rank.isdecimal():
            while (self.told / "gate").exists():
                (self.told / "waiting").touch()
                time.sleep(0.005)
            if (self.told / f"full-{int(rank)}").exists():
                raise OSError(errno.ENOSPC, "No space left on device")
            if (self.told / f"kill-{int(rank)}").exists():
                os.kill(os.getpid(), signal.SIGKILL)
        super().write(path, chunks)

    def _count(self, operation: str, path: str) -> None:
        at = self.told / "at"
        if at.exists() and self.done == int(at.read_text()):
            os.kill(os.getpid(), signal.SIGKILL)
        self.done += 1


class Unsendable(LocalStore):
    """Cannot be pickled."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, probe=lambda operation, path: None)


class Closed(LocalStore):
    """Can be pickled, but not opened by another process."""

    def __setstate__(self, state: dict) -> None:
        raise RuntimeError("this store belongs to one process")
