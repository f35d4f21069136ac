"""Which points of a sweep are trained, and until when: all to their end, or the best of each rung on to the next.

Successive halving (Jamieson and Talwalkar, 2016). A run keeps the schedule of its whole length from the first step, and pauses
at a rung by `train.stop_at`, so the points that go on are bit for bit those that were never paused.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from forge_train.sweep.execute import Executor, Task, outcomes
from forge_train.sweep.grid import Sweep
from forge_train.sweep.outcome import Outcome
from forge_train.sweep.points import Point
from forge_train.sweep.schema import Search


def train(sweep: Sweep, executor: Executor, say: Callable[[str], None]) -> None:
    """Trains what is left of a sweep."""
    alive = list(sweep.points)
    for rung in sweep.grid.search.rungs:
        found = outcomes(sweep)
        executor.run([Task(point, rung) for point in alive if not _past(found[point.name], rung)])
        if executor.asked.times:
            return
        found = outcomes(sweep)
        values = {point.name: found[point.name].rungs.get(str(rung)) for point in alive}
        going_on = survivors(alive, values, sweep.grid.search)
        say(f"after step {rung}: {len(going_on)} of {len(alive)} points go on")
        alive = going_on
    found = outcomes(sweep)
    executor.run([Task(point) for point in alive if not found[point.name].ended])


def survivors(points: Sequence[Point], values: Mapping[str, float | None], search: Search) -> list[Point]:
    """The best part of the points, in their own order. Points with equal values rank in the order of the sweep; one without a
    value, which failed or diverged, never goes on."""
    count = max(1, math.floor(search.keep * len(points) + 0.5))
    sign = 1 if search.mode == "min" else -1
    sound = [(sign * value, index) for index, point in enumerate(points) if (value := values.get(point.name)) is not None]
    return [points[index] for index in sorted(index for _, index in sorted(sound)[:count])]


def _past(outcome: Outcome, rung: int) -> bool:
    """Whether nothing is left to do at a rung; a run that failed there is tried again."""
    return str(rung) in outcome.rungs and outcome.status != "failed"
