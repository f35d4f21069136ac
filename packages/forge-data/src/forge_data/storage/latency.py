"""Many small reads: one after the other where the file system answers at once, several at a time where it answers late."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Found = TypeVar("Found")

_READERS = 16
_LATE = 1e-3
"""Seconds per read from which on several are made at a time."""


def read_each(read: Callable[[Item], Found], items: Sequence[Item]) -> list[Found]:
    """`read` of every item, in order; the first ones show how late the file system answers."""
    began = time.perf_counter()
    first = [read(item) for item in items[:_READERS]]
    rest = items[_READERS:]
    if time.perf_counter() - began < _LATE * len(first):  # threads would only wait for each other
        return first + [read(item) for item in rest]
    with ThreadPoolExecutor(_READERS, thread_name_prefix="read") as pool:
        return first + list(pool.map(read, rest))
