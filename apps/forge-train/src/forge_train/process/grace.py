"""Estimates from earlier saves whether the time left after a stop signal is enough for another save.

A scheduler sends a signal before it ends a job, and kills the job after a grace period. Neither a killed save nor a skipped save
does harm, but a killed run has no exit code that makes the scheduler start it again.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median

END = "SLURM_JOB_END_TIME"
"""Environment variable with the time at which SLURM ends the job, in seconds since 1970."""

NEWEST = 5
"""Number of recent saves whose median duration is the estimate for the next one."""


class Grace:
    """The time that one process has left to save.

    Args:
        seconds: seconds between a stop signal and the end of this process; None if unknown.
        environment: may have the time at which SLURM ends the job. A time in the past, as when clocks differ, is ignored.
        since: returns the seconds since the first signal; 0 without one.
        clock: returns the seconds since 1970.
    """

    def __init__(
        self,
        seconds: float | None,
        environment: Mapping[str, str],
        since: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.seconds, self.since, self.clock = seconds, since, clock
        end = environment.get(END, "")
        self.end = int(end) if end.isdigit() else None
        self._took: deque[float] = deque(maxlen=NEWEST)

    def took(self, seconds: float) -> None:
        """Records the duration of a save, from its begin until it was durable."""
        self._took.append(seconds)

    @property
    def needed(self) -> float:
        """Estimated seconds of a save; 0 before the first measurement."""
        return median(self._took) if self._took else 0.0

    def left(self) -> float:
        """Returns the seconds until this process is killed; infinite if unknown."""
        left = math.inf if self.seconds is None else self.seconds - self.since()
        until = math.inf if self.end is None else self.end - self.clock()
        return min(left, until if until > 0 else math.inf)

    def lacks(self) -> float:
        """Returns the seconds by which the time left is too short for a save; 0 if it is enough."""
        return max(0.0, self.needed - self.left())

    def too_short(self) -> str:
        """Returns a warning if no save fits into the grace period; empty if one fits or the period is unknown."""
        if self.seconds is None or self.needed <= self.seconds:
            return ""
        return (
            f"a save takes {self.needed:.3g} s, but checkpoint.grace leaves {self.seconds:.3g} s after a signal: the run will "
            "stop without saving. Request more time from the scheduler (sbatch --signal=USR1@SECONDS) and raise "
            "checkpoint.grace, or save more often"
        )
