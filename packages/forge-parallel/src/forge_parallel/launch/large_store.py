"""Use of a store by very many ranks: one thread of one process serves them all, so each rank may make only a few calls.

A call takes 10 to 20 us of the process that hosts the store, a key within a call of many about 1 us. If every rank of N reads a
value of every other one, that process serves N * N calls: 6 minutes for 4,096 ranks. So one rank reads for all (`ReadingTurn`),
in calls of many keys, and polls of large worlds are further apart (`pause_of`).
"""

import time
from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")

_AT_ONCE = 1024
"""Maximum number of keys of a call. The store serves nobody else meanwhile."""

_SECONDS_PER_RANK = 1e-4
"""Minimum pause between polls for each rank of the world: two calls of 20 us in every pause are 40 % of one core."""


def pause_of(size: int, least: float) -> float:
    """Returns the seconds between two polls by each of `size` ranks: `least`, but not less than 100 us per rank."""
    return max(least, _SECONDS_PER_RANK * size)


def absent(store: Any, keys: Sequence[str], most: int | None = None) -> list[str]:
    """Returns the keys that the store does not have, in order; at most the first `most`.

    Halves the keys until a half is present or has one key. So m absent keys of n take about 2 m log2(n / m) calls, and one call
    tells that none is absent.
    """
    missing: list[str] = []
    halves = [list(part) for part in reversed(_parts(keys))]
    while halves and (most is None or len(missing) < most):
        half = halves.pop()
        if store.check(half):
            continue
        if len(half) == 1:
            missing += half
        else:
            middle = len(half) // 2
            halves += [half[middle:], half[:middle]]
    return missing


def values(store: Any, keys: Sequence[str]) -> list[bytes]:
    """Returns the values of keys, all of which the store must have."""
    return [value for part in _parts(keys) for value in store.multi_get(list(part))]


def put(store: Any, entries: Sequence[tuple[str, str]]) -> None:
    """Sets keys to values."""
    for part in _parts(entries):
        store.multi_set([key for key, _ in part], [value for _, value in part])


def _parts(items: Sequence[T]) -> list[Sequence[T]]:
    return [items[start : start + _AT_ONCE] for start in range(0, len(items), _AT_ONCE)]


class ReadingTurn:
    """The turn of one rank among those that want the same work done once, such as reading the status of all ranks.

    The first rank that asks has the turn, and keeps it by asking again. If it is silent for `seconds`, the next one that asks has
    it. No clocks are compared: a rank observes for how long the value in the store has not changed.

    Args:
        store: a store with `compare_set`.
        key: key of the turn.
        rank: this rank.
        seconds: time after which a silent rank loses its turn.
    """

    def __init__(self, store: Any, key: str, rank: int, seconds: float) -> None:
        self._store, self._key, self._rank, self._seconds = store, key, rank, seconds
        self._own, self._count = "", 0
        self._seen, self._since = "", 0.0

    def mine(self) -> bool:
        """Whether this rank has the turn; takes or renews it if possible. Makes one or two calls of the store."""
        now = time.monotonic()
        holder = self._take(self._own)
        if not self._own and (not holder or (holder == self._seen and now - self._since > self._seconds)):
            holder = self._take(holder)  # it was left, or its holder is silent
        if holder != self._seen:
            self._seen, self._since = holder, now
        return bool(self._own)

    def leave(self) -> None:
        """Leaves the turn, if this rank has it, to the next rank that asks."""
        if self._own:
            self._store.compare_set(self._key, self._own, "")
            self._own = ""

    def _take(self, before: str) -> str:
        """Replaces the value `before` by a new one of this rank. Returns the value that the store has now."""
        self._count += 1
        new = f"{self._rank} {self._count}"
        holder = self._store.compare_set(self._key, before, new).decode()
        self._own = new if holder == new else ""
        return holder
