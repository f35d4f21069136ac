"""Nested events of one lane, such as operators of a thread: which one is the innermost at each instant."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import pairwise

from forge_train.profiling.trace import Event

Piece = tuple[int, int, Event]
"""From, to, and the event that is innermost meanwhile."""


def innermost(events: Iterable[Event]) -> list[Piece]:
    """Pieces of time in which some event runs, in order and without overlap: the innermost is the one that began last.

    So the pieces of an event are its own time without that of what it calls, however deep, also when recorded twice or when a
    child outlasts its parent by a rounding. Events without a length have no piece.
    """
    waiting = sorted(
        (event for event in events if event.end > event.start), key=lambda event: (event.start, -event.end, event.name)
    )
    points = sorted({point for event in waiting for point in (event.start, event.end)})
    running: list[tuple[int, int, str, int, Event]] = []
    pieces: list[Piece] = []
    place = 0
    for start, end in pairwise(points):
        while place < len(waiting) and waiting[place].start <= start:
            event = waiting[place]
            heappush(running, (-event.start, event.end, event.name, -place, event))
            place += 1
        while running and running[0][1] <= start:
            heappop(running)
        if not running:
            continue
        found = running[0][-1]
        if pieces and pieces[-1][1] == start and pieces[-1][2] is found:
            pieces[-1] = (pieces[-1][0], end, found)
        else:
            pieces.append((start, end, found))
    return pieces


class Enclosing:
    """Finds the innermost of some events that runs on a lane at an instant."""

    def __init__(self, events: Iterable[Event]) -> None:
        lanes: dict[tuple[str, str], list[Event]] = defaultdict(list)
        for event in events:
            lanes[event.lane].append(event)
        self._pieces = {lane: innermost(found) for lane, found in lanes.items()}
        self._starts = {lane: [piece[0] for piece in pieces] for lane, pieces in self._pieces.items()}

    def lanes(self) -> Sequence[list[Piece]]:
        """The pieces of every lane."""
        return list(self._pieces.values())

    def at(self, lane: tuple[str, str], instant: int) -> str:
        """The name of the event; "" where none runs."""
        place = bisect_right(self._starts.get(lane, ()), instant) - 1
        if place < 0:
            return ""
        _, end, event = self._pieces[lane][place]
        return event.name if instant < end else ""
