"""Goodput: the share of a run's wall time that was spent on steps that count, and where the rest went.

The wall time is divided without gaps and overlaps, from the begin of the first process to the newest record. Each start has

- down time before it: from the newest record of the start before to the begin of its process. A start that was killed has its
  newest line of hook `log` as its newest record. Time after a start that ended by itself (exit code 0 or 9) does not count:
  nobody waited for another start.
- start-up: until its first step begins, and what its first lines took longer than its steps do at the end, such as compilation.
- pauses: training waited for a hook, such as `save` or `evaluate`.
- steps. Those after the step from which a later start went on are repeated, the others count. A step between two lines is placed
  in proportion.

Goodput counts time, not the speed of steps ("Goodput metric as measure of ML productivity", Google Cloud, 2024).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forge_train.runs.segment import MetricsLine, MetricsSegment
from forge_train.starts import RunStart
from forge_train.trackers import metric_value

CAUSES = ("start-up", "repeated steps", "checkpoints", "evaluation", "other hooks", "down")
"""What wall time is lost to."""

_PAUSES = {"save": "checkpoints", "evaluate": "evaluation", "tasks": "evaluation"}
_BY_ITSELF = (0, 9)


@dataclass(frozen=True)
class Goodput:
    """How the wall time of a run was spent, in seconds.

    Attributes:
        wall: from the begin of the first process to the newest record.
        steps: steps that count.
        lost: seconds by cause, see `CAUSES`; `wall` is `steps` and the sum of these.
    """

    wall: float
    steps: float
    lost: Mapping[str, float]

    @property
    def share(self) -> float:
        """Share of the wall time that was spent on steps that count."""
        return self.steps / self.wall if self.wall > 0 else 0.0


@dataclass(frozen=True)
class _Spent:
    """The time of one start after its first step began.

    Attributes:
        begin, end: when its first step began, and its newest record.
        reached: its last known step.
        last: its newest line; None without lines.
        pauses: seconds by cause.
    """

    begin: float
    end: float
    reached: int
    last: MetricsLine | None
    pauses: Mapping[str, float]


def goodput(starts: Sequence[RunStart], segments: Sequence[MetricsSegment]) -> Goodput | None:
    """Returns the goodput of a run; None if the begin of a process is unknown, or no start has a line or an end.

    Args:
        starts: starts, oldest first.
        segments: the lines of each start.
    """
    spent = [_spent(start, segment) for start, segment in zip(starts, segments, strict=True)]
    known = any(start.end or each.last for start, each in zip(starts, spent, strict=True))
    if not known or any(start.began is None for start in starts):
        return None
    lost: dict[str, float] = dict.fromkeys(CAUSES, 0.0)
    wall, steps, now, by_itself = 0.0, 0.0, None, True
    for number_, (start, each) in enumerate(zip(starts, spent, strict=True)):
        began = start.began or 0.0
        if now is None:
            now = began
        gap = max(0.0, began - now)
        lost["down"] += 0.0 if by_itself else gap
        wall += 0.0 if by_itself else gap
        now = max(now, began)
        begin, end = max(now, each.begin), max(now, each.begin, each.end)
        lost["start-up"] += begin - now
        wall += end - now
        paused = sum(each.pauses.values())
        scale = min(1.0, (end - begin) / paused) if paused > 0 else 1.0  # starts may overlap
        for cause, seconds in each.pauses.items():
            lost[cause] += seconds * scale
        trained = end - begin - paused * scale
        valid = min((later.step for later in starts[number_ + 1 :]), default=each.reached)
        counted = min(trained, _trained(start, segments[number_], each, valid, trained))
        steps += counted
        lost["repeated steps"] += trained - counted
        now, by_itself = end, start.end is not None and start.end.code in _BY_ITSELF
    return Goodput(wall, steps, lost)


def _spent(start: RunStart, segment: MetricsSegment) -> _Spent:
    """Returns where the time of a start went, from its end, its first and its newest line."""
    first, last = segment.first_after(start.step), segment.newest()
    end, reached, pauses = start.time, start.step, {}
    if last is not None and last.step is not None:
        end, reached, pauses = max(end, last.time), max(reached, last.step), last.pauses
    if start.end is not None:
        end, reached, pauses = max(start.time, start.end.time), start.end.step, start.end.pauses
    by_cause: dict[str, float] = {}
    for hook, seconds in pauses.items():
        cause = _PAUSES.get(hook, "other hooks")
        by_cause[cause] = by_cause.get(cause, 0.0) + seconds
    begin = _first_step(start, first, last)
    if reached <= start.step:  # it has completed no step, so it has done nothing but start and pause
        begin = max(begin, end - sum(by_cause.values()))
    return _Spent(begin, end, reached, last, by_cause)


def _first_step(start: RunStart, first: MetricsLine | None, last: MetricsLine | None) -> float:
    """Returns when the first step of a start would have begun, had it taken as long as the newest steps."""
    seconds = metric_value(last.values.get("step_seconds")) if last is not None else None
    if first is None or first.step is None or seconds is None:
        return start.time
    begin = first.time - first.waited - seconds * (first.step - start.step)
    return min(max(start.time, begin), first.time)


def _trained(start: RunStart, segment: MetricsSegment, spent: _Spent, step: int, whole: float) -> float:
    """Returns the seconds of a start's steps up to `step`; `whole` is the time of all its steps."""
    if step >= spent.reached:
        return whole
    if step <= start.step:
        return 0.0
    before, after = segment.around(step, (step - start.step) / (spent.reached - start.step))
    low, high = (start.step, 0.0), (spent.reached, whole)
    if before is not None and before.step is not None and before.step > start.step:
        low = before.step, before.time - spent.begin - before.waited
    if after is not None and after.step is not None:
        high = after.step, after.time - spent.begin - after.waited
    share = (step - low[0]) / (high[0] - low[0])
    return max(0.0, low[1] + share * (high[1] - low[1]))
