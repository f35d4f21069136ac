"""Limits of the sections of a run, learned from how long they took before."""

from collections import defaultdict, deque
from typing import Protocol


class Limits(Protocol):
    """Maximum durations of the sections of a run, by name."""

    def took(self, section: str, seconds: float) -> None:
        """Records that a section took `seconds`."""
        ...

    def of(self, section: str, waiting: float) -> float | None:
        """Returns the limit in seconds; None if unknown. `waiting` is the number of seconds that ranks wait for each other."""
        ...


class Unlimited:
    """Sections without limits."""

    def took(self, section: str, seconds: float) -> None:
        pass

    def of(self, section: str, waiting: float) -> float | None:
        return None


WINDOW = 200
LEAST = 10
QUANTILE = 0.9
FACTOR = 10.0


class LearnedLimits:
    """Limits of the sections of one process: `FACTOR` times what 9 of 10 of its last `WINDOW` times were, never below a floor.

    A quantile moves little with a few times that are far off, such as a first step that compiles. Sections have names; what
    takes another time on purpose, as steps of another size do, has another one. Before `LEAST` times nothing is known.

    Args:
        floor: seconds; no limit is lower.
        waiting: sections in which a process may always wait only as long as it may for other processes, known or not.
    """

    def __init__(self, floor: float, waiting: tuple[str, ...] = ()) -> None:
        self.floor, self.waiting = floor, waiting
        self._times: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._limits: dict[str, float] = {}

    def took(self, section: str, seconds: float) -> None:
        """A section has ended after so many seconds."""
        times = self._times[section]
        times.append(seconds)
        if len(times) >= LEAST:
            usual = sorted(times)[int(QUANTILE * (len(times) - 1))]
            self._limits[section] = max(self.floor, FACTOR * usual)

    def of(self, section: str, waiting: float) -> float | None:
        """Seconds that a section may take; None while nothing is known of it. Another thread may ask.

        Args:
            waiting: seconds that processes wait for each other.
        """
        return self._limits.get(section, waiting if section in self.waiting else None)
