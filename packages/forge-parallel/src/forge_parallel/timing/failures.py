"""How often to save: the interval between checkpoints with the least time lost, for a given rate of failures.

With a stall d for each save, a restart r, and a failure of the job every M seconds, saving every T seconds loses the share

    d / (T + d)  +  (T / 2 + r) / M

of the time: stalls, and on average half an interval and a restart for each failure. Its minimum over T is close to sqrt(2 d M)
(Young, 1974); Daly (2006) gives the next terms, which this module uses.
"""

from dataclasses import dataclass
from math import sqrt

from forge_core.errors import ForgeError

GPU_HOURS = 50_000.0
"""Hours between failures of one GPU with its share of host and network: 419 interruptions of 16,384 GPUs in 54 days (Llama 3,
2024, section 3.3.4)."""


@dataclass(frozen=True)
class SavePlan:
    """When to save.

    Attributes:
        stall: seconds for which training stops at each save.
        restart: seconds from a failure to the next step.
        between_failures: seconds between failures of the whole job.
        interval: seconds between saves with the least time lost.
    """

    stall: float
    restart: float
    between_failures: float
    interval: float

    def lost(self, interval: float | None = None) -> float:
        """Returns the share of time lost with some interval in seconds; by default the best one."""
        seconds = self.interval if interval is None else interval
        return min(1.0, self.stall / (seconds + self.stall) + (seconds / 2 + self.restart) / self.between_failures)


def best_interval(world: int, stall: float, restart: float = 300.0, gpu_hours: float = GPU_HOURS) -> SavePlan:
    """Returns the best interval for a job on `world` GPUs, one of which fails once in `gpu_hours` hours.

    Raises:
        ForgeError: a number is not positive.
    """
    for name, value in {"stall": stall, "restart": restart, "hours between failures of a GPU": gpu_hours}.items():
        if not value > 0:
            raise ForgeError(f"{name} = {value}: must be positive")
    between = 3600.0 * gpu_hours / world
    if stall >= 2 * between:
        interval = between  # failures come faster than saves: Daly (2006), equation 37
    else:
        ratio = stall / (2 * between)
        interval = sqrt(2 * stall * between) * (1 + sqrt(ratio) / 3 + ratio / 9) - stall
    return SavePlan(stall, restart, between, interval)
