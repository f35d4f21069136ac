"""The rules of a house as a plugin of Forge: how its recipes begin, what they need, and what its trackers must do."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forge_core import Fault, Layout
from forge_core.protocols import Job

PRESET = Path(__file__).parent / "house.toml"
LONG, MOST = 1000, 500
"""Steps of a long run, and the largest number of steps that it may lose."""
WRITES, SECONDS = 20, 0.1
"""Numbers of a tracker's test: writes, and the time that one may take."""


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
        """Checks that a tracker does not slow a run: a quarter of 20 writes takes at most 0.1 s each. Other programs on the
        machine slow the rest."""
        from time import perf_counter

        from forge_testing import unstarted_run

        with unstarted_run() as run:
            tracker = component.build(run)
            tracker.rewind(0)
            times = []
            for step in range(1, WRITES + 1):
                start = perf_counter()
                tracker.write(step, {"loss": 1 / step})
                times.append(perf_counter() - start)
            tracker.close()
        spent = sorted(times)[WRITES // 4]
        assert spent <= SECONDS, f"a write takes {1000 * spent:.0f} ms"
