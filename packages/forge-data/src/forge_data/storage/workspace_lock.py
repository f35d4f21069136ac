"""One process at a time prepares what is kept in a workspace."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from forge_core.errors import DataError


@contextmanager
def locked(workspace: Path) -> Iterator[bool]:
    """Creates the workspace and holds its lock; others wait, and then find what this one made.

    Gives whether the lock is held, so that no other process writes in the workspace.

    Where the file system has no locks, several may prepare the same thing: each writes next to the target and renames,
    so that only time is lost.

    Raises:
        DataError: the directory cannot be written.
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
