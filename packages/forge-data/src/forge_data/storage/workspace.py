"""Unfinished output next to its target, and the lock of a workspace.

A writer holds a lock of the operating system, which is released when the process ends, for any reason. So leftovers of killed
processes are recognized. On file systems without locks, leftovers are never removed; they only take up space.
"""

import fcntl
import glob
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex

from forge_core.errors import DataError


class Partial:
    """A new directory or file next to a target; no other process removes it while this one runs.

    Attributes:
        path: path of the directory or file.
    """

    def __init__(self, target: Path, *, directory: bool) -> None:
        """Removes leftovers of killed processes next to `target`, and creates a new directory or file.

        Raises:
            OSError: it cannot be created.
        """
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_left(target)
        while True:
            self.path = target.with_name(f"{target.name}.partial-{token_hex(4)}")
            if directory:
                self.path.mkdir()
            else:
                self.path.touch(exist_ok=False)
            self._descriptor = os.open(self.path, os.O_RDONLY)
            with suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            if self.path.exists():
                return
            os.close(self._descriptor)  # another process removed it as a leftover before it was locked

    def close(self) -> None:
        """Removes the directory or file unless it was renamed, and releases the lock."""
        _remove(self.path)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def remove_left(target: Path) -> None:
    """Removes the partial files and directories of a target whose writers have ended."""
    for name in glob.glob(f"{glob.escape(str(target))}.partial-*"):  # noqa: PTH207 (a path may hold magic characters)
        try:
            descriptor = os.open(name, os.O_RDONLY)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(Path(name))
        except OSError:  # another process writes it, or the file system has no locks
            continue
        finally:
            os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def locked(workspace: Path) -> Iterator[bool]:
    """Creates the workspace and holds its lock; other processes wait, and then use the prepared data.

    On file systems without locks, several processes may prepare the same data. Each writes next to the target and renames,
    so only time is lost.

    Yields:
        Whether the lock is held.

    Raises:
        DataError: the directory is not writable.
    """
    try:
        workspace.mkdir(parents=True, exist_ok=True)
        file = (workspace / ".lock").open("a")
    except OSError as error:
        raise DataError(f"{workspace} cannot be written: {error.strerror}; choose another directory") from error
    with file:
        held = False
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
            held = True
        yield held
