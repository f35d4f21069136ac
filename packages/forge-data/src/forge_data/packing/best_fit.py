"""Best-fit-decreasing: pieces of documents into rows of one capacity, the longest first, each into the fullest row it fits.

Ding et al., "Fewer Truncations Improve Language Modeling" (2024), pack whole documents so; Johnson (1974) shows that it
uses at most 11/9 of the least number of rows, plus 4. Lengths are integers up to the capacity, so rows with equal room are
interchangeable: all pieces of one length that go into rows with one amount of room are placed at once. The work is
that of sorting plus a number of array operations that depends on the capacity and not on the number of pieces.
"""

from collections import defaultdict, deque

import numpy as np


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Row of each piece.

    Args:
        lengths: (N,) integers from 1 to `capacity`.
        capacity: tokens of a row.

    Returns:
        (rows (N,) int64, number of rows). Equal lengths are placed in the order of their numbers.
    """
    order = _descending(lengths, capacity)
    counts = np.bincount(lengths, minlength=capacity + 1)
    rows = np.empty(len(lengths), dtype=np.int64)
    room = _Room()
    used = start = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        stop = start + int(counts[length])
        while start < stop:
            free, found = room.tightest(length)
            if found is None:
                free = capacity
                found = np.arange(used, used - (start - stop) // (capacity // length))  # as many as these pieces need
                used += len(found)
            start = _place(order, rows, start, stop, length, free, found, room)
    return rows, used


def _place(
    order: np.ndarray, rows: np.ndarray, start: int, stop: int, length: int, free: int, found: np.ndarray, room: "_Room"
) -> int:
    """Puts pieces order[start:stop], all of one length, into rows `found`, all with `free` room; returns the next piece.

    A row that took one piece has the tightest fit for the next as long as that fits too, so rows are filled in turn.
    """
    each = free // length
    taken = found[: -((start - stop) // each)]
    placed = min(stop - start, len(taken) * each)
    rows[order[start : start + placed]] = np.repeat(taken, each)[:placed]
    left_over = placed - (len(taken) - 1) * each  # pieces in the last row
    if len(found) > len(taken):
        room.give_back(free, found[len(taken) :])
    if left_over < each:
        room.add(free - left_over * length, taken[-1:])
        taken = taken[:-1]
    room.add(free - each * length, taken)
    return start + placed


class _Room:
    """Rows by the room that is left in them."""

    def __init__(self) -> None:
        self._rows: defaultdict[int, deque[np.ndarray]] = defaultdict(deque)
        self._some = 0  # bit r is set where some row has room r

    def tightest(self, length: int) -> tuple[int, np.ndarray | None]:
        """The smallest room of at least `length` that a row has, and rows that have it; they are taken out."""
        above = self._some >> length
        if not above:
            return 0, None
        free = length + (above & -above).bit_length() - 1
        rows = self._rows[free].popleft()
        if not self._rows[free]:
            self._some ^= 1 << free
        return free, rows

    def add(self, free: int, rows: np.ndarray) -> None:
        """Notes rows that have this much room left."""
        if free and len(rows):
            self._rows[free].append(rows)
            self._some |= 1 << free

    def give_back(self, free: int, rows: np.ndarray) -> None:
        """Returns rows that were taken out and not used, so that they come first again."""
        self._rows[free].appendleft(rows)
        self._some |= 1 << free


def _descending(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Numbers of pieces by falling length, equal ones in order; 16 bits are sorted by radix, which is much faster."""
    keys = capacity - lengths
    return np.argsort(keys.astype(np.uint16) if capacity <= 1 << 16 else keys, kind="stable")
