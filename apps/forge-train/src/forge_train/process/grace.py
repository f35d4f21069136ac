"""Whether the time that is left after a request to stop is enough for a save, by how long saves have taken.

A scheduler that ends a job asks for it first, by a signal, and kills it after a grace. A save that is killed is harmless, and so
is one that is left out; but a run that is killed has no exit code that says to start it again.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median

END = "SLURM_JOB_END_TIME"
"""Where SLURM says when it will end the job: seconds since 1970."""

NEWEST = 5
"""Saves by whose median the next one is judged."""


class Grace:
    """Of one process.

    Args:
        seconds: that lie between a signal and the end of this process; None where it is not known.
        environment: may have SLURM's end of the job. One that has passed, as where clocks differ, is not believed.
        since: seconds since the first signal; 0 without one.
        clock: seconds since 1970.
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
        """A save is durable, so long after it was begun."""
        self._took.append(seconds)

    @property
    def needed(self) -> float:
        """Seconds that a save takes; 0 while none has been measured."""
        return median(self._took) if self._took else 0.0

    def left(self) -> float:
        """Seconds until this process is killed, if it was asked to stop; infinite where nothing says when."""
        left = math.inf if self.seconds is None else self.seconds - self.since()
        until = math.inf if self.end is None else self.end - self.clock()
        return min(left, until if until > 0 else math.inf)

    def lacks(self) -> float:
        """Seconds by which the time that is left is too short for a save; 0 where it is enough."""
        return max(0.0, self.needed - self.left())

    def too_short(self) -> str:
        """What to say of a grace in which no save fits; empty where one does, or where nothing says how long it is."""
        if self.seconds is None or self.needed <= self.seconds:
            return ""
        return (
            f"a save takes {self.needed:.3g} s, and checkpoint.grace leaves {self.seconds:.3g} s after a signal: the save at a "
            "stop will be left out. Ask the scheduler for more time (sbatch --signal=USR1@SECONDS) and raise checkpoint.grace, "
            "or save more often"
        )
