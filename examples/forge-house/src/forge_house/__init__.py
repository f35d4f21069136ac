"""The rules of a house as a plugin of Forge: how its recipes begin, what they need, and what its trackers must do."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forge_core import Fault, Layout
from forge_core.protocols import Job

PRESET = Path(__file__).parent / "house.toml"
LONG, MOST = 1000, 500
"""Steps of a long run, and the largest number of steps that it may lose."""
WRITES, SECONDS = 100, 2.0
"""Numbers of a tracker's test: writes, and the time that they may take."""


def house_rules(job: Job, layout: Layout) -> Iterator[Fault]:
    """Yields a fault for each key of a recipe that breaks a rule of the house."""
    del layout  # the rule is the same for all of them
    if job.train.max_steps >= LONG and not 0 < job.checkpoint.every <= MOST:
        yield Fault(
            "checkpoint.every",
            f"a run of {job.train.max_steps} steps saves every {job.checkpoint.every} steps, but the house loses at most {MOST}",
            hint=f"set a number from 1 to {MOST}",
        )


class TrackerRules:
    """Checks of trackers, besides those of Forge."""

    @staticmethod
    def check_fast(component: Any) -> None:
        """Checks that a tracker does not slow a run: 100 writes take at most two seconds."""
        from time import perf_counter

        from forge_testing import unstarted_run

        with unstarted_run() as run:
            tracker = component.build(run)
            tracker.rewind(0)
            start = perf_counter()
            for step in range(1, WRITES + 1):
                tracker.write(step, {"loss": 1 / step})
            spent = perf_counter() - start
            tracker.close()
        assert spent <= SECONDS, f"{WRITES} writes take {spent:.1f} s"
