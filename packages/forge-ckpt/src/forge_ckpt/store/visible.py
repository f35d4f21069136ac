"""Waits for files of other nodes: network file systems cache listings."""

import time
from collections.abc import Iterable
from typing import NamedTuple

from forge_core.protocols.checkpoint import Store

SECONDS = 60.0


class Hidden(NamedTuple):
    """A file that is not visible with its full length, and the length that it has here; None without a file."""

    name: str
    length: int
    found: int | None


def hidden_file(
    store: Store, directory: str, files: Iterable[tuple[str, int]], absent: tuple[type[Exception], ...] = (FileNotFoundError,)
) -> Hidden | None:
    """Waits until every file of `directory` has its length on this rank; gives the first one that has not in time.

    Args:
        absent: exceptions of the store that count as a file that is not visible yet; others are raised.
    """
    deadline = time.monotonic() + SECONDS
    for name, length in files:
        while (found := _length(store, f"{directory}/{name}", absent)) != length:
            if time.monotonic() > deadline:
                return Hidden(name, length, found)
            time.sleep(0.05)
    return None


def _length(store: Store, path: str, absent: tuple[type[Exception], ...]) -> int | None:
    try:
        return store.size(path)
    except absent:
        return None
