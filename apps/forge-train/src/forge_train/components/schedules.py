"""Learning-rate schedules as they are chosen in `[schedule]`, and their arithmetic.

A run of S steps calls the function with s = 0 ... S - 1. Progress p of a decay from `start` to `stop` is
(s - start) / (stop - start), so the first step of a decay still runs at the full rate and `floor` would be reached one
step after the last: no step of a run has the factor 0, not even with `floor` = 0.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt

from forge_core.component import FREE, Component
from forge_core.errors import ConfigError, Fault

Factor = Callable[[int], float]
"""Optimizer step 0, 1, ... -> factor on every group's learning rate; never 0 for a step of the run."""

SHAPES: MappingProxyType[str, Callable[[float], float]] = MappingProxyType(
    {
        "linear": lambda p: 1.0 - p,
        "cosine": lambda p: 0.5 * (1.0 + math.cos(math.pi * p)),
        "sqrt": lambda p: math.sqrt(1.0 - p),
        "one_minus_sqrt": lambda p: 1.0 - math.sqrt(p),
    }
)
"""Decay curves: progress in [0, 1] -> what is left of the full rate; 1 at 0, 0 at 1."""


def constant(step: int) -> float:  # noqa: ARG001 (a factor is given the step)
    """1 at every step."""
    return 1.0


def decayed(shape: str, *, start: int, stop: int, floor: float) -> Factor:
    """1 before `start`, then floor + (1 - floor) * shape(p), and `floor` from `stop` on."""
    curve = SHAPES[shape]
    length = stop - start

    def factor(step: int) -> float:
        if step < start:
            return 1.0
        if step >= stop:
            return floor
        return floor + (1.0 - floor) * curve((step - start) / length)

    return factor


def stepped(starts: Sequence[int], factors: Sequence[float]) -> Factor:
    """1 before the first start, then `factors[i]` from step `starts[i]` on; starts ascend."""

    def factor(step: int) -> float:
        return ([1.0, *factors])[bisect_right(starts, step)]

    return factor


def warmed(warmup: int, after: Factor) -> Factor:
    """(s + 1) / warmup for the first `warmup` steps, so that the first is not lost at rate 0; then `after`."""

    def factor(step: int) -> float:
        return (step + 1) / warmup if step < warmup else after(step)

    return factor


@dataclass(frozen=True, kw_only=True)
class Schedule(Component):
    """What every schedule of Forge has: a linear warm-up, whose step s of W runs at (s + 1) / W."""

    key_class: ClassVar = FREE

    warmup: Annotated[int, Ge(0)] = 0
    """Optimizer steps of the linear warm-up; 0 starts at the full rate."""

    def faults(self, steps: int) -> list[Fault]:
        """What is wrong with this schedule for a run of `steps` optimizer steps."""
        if self.warmup > steps:
            return [
                Fault(
                    "schedule.warmup",
                    f"a warm-up of {self.warmup} steps is longer than the run (train.max_steps = {steps})",
                    hint="lower schedule.warmup or raise train.max_steps",
                )
            ]
        return []

    def refuse(self, steps: int) -> None:
        """Raises ConfigError when the schedule does not fit `steps`."""
        if faults := self.faults(steps):
            raise ConfigError(faults)


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """The full rate after the warm-up."""

    def build(self, steps: int) -> Factor:
        self.refuse(steps)
        return warmed(self.warmup, constant)


@dataclass(frozen=True, kw_only=True)
class Decaying(Schedule):
    """A schedule that decays from the end of the warm-up to the end of the run."""

    def faults(self, steps: int) -> list[Fault]:
        """Those of every schedule, and a warm-up that leaves no step for the decay."""
        faults = super().faults(steps)
        if not faults and self.warmup == steps:
            message = f"a warm-up of {self.warmup} steps leaves no step for the decay (train.max_steps = {steps})"
            faults.append(Fault("schedule.warmup", message, hint="lower schedule.warmup, or choose name = 'constant'"))
        return faults


@dataclass(frozen=True, kw_only=True)
class Cosine(Decaying):
    """Half a cosine from the full rate after the warm-up to `min_ratio` at the end (Loshchilov and Hutter, 2017)."""

    key_class: ClassVar = FREE

    min_ratio: Annotated[float, Ge(0), Le(1)] = 0.1
    """Factor that the curve reaches just after the last step, relative to the full rate."""

    def build(self, steps: int) -> Factor:
        self.refuse(steps)
        return warmed(self.warmup, decayed("cosine", start=self.warmup, stop=steps, floor=self.min_ratio))


@dataclass(frozen=True, kw_only=True)
class Linear(Decaying):
    """A straight line from the full rate after the warm-up to `min_ratio` at the end."""

    key_class: ClassVar = FREE

    min_ratio: Annotated[float, Ge(0), Le(1)] = 0.0
    """Factor that the line reaches just after the last step, relative to the full rate."""

    def build(self, steps: int) -> Factor:
        self.refuse(steps)
        return warmed(self.warmup, decayed("linear", start=self.warmup, stop=steps, floor=self.min_ratio))


@dataclass(frozen=True, kw_only=True)
class Wsd(Schedule):
    """Warm-up, stable, decay: the full rate until the last part of the run (Hu et al., 2024, MiniCPM)."""

    key_class: ClassVar = FREE

    decay: Annotated[float, Gt(0), Le(1)] = 0.2
    """Part of the whole run, warm-up included, that the decay takes: 0.2 is its last fifth, rounded, at least one step."""
    shape: Literal["linear", "cosine", "sqrt", "one_minus_sqrt"] = "linear"
    """Curve of the decay over its progress p: 1 - p, (1 + cos(pi p)) / 2, sqrt(1 - p), or 1 - sqrt(p) (Haegele et al., 2024)."""
    min_ratio: Annotated[float, Ge(0), Le(1)] = 0.0
    """Factor that the decay reaches just after the last step, relative to the full rate."""

    def decay_steps(self, steps: int) -> int:
        """Optimizer steps of the decay in a run of `steps`."""
        return max(1, round(self.decay * steps))

    def faults(self, steps: int) -> list[Fault]:
        """Those of every schedule, and a decay that would start inside the warm-up."""
        faults = super().faults(steps)
        decay = self.decay_steps(steps)
        if not faults and self.warmup + decay > steps:
            faults.append(
                Fault(
                    "schedule.decay",
                    f"{decay} steps of decay ({self.decay:g} of train.max_steps = {steps}) and schedule.warmup = {self.warmup} "
                    f"are {self.warmup + decay} steps, more than the run has",
                    hint="lower schedule.decay or schedule.warmup",
                )
            )
        return faults

    def build(self, steps: int) -> Factor:
        self.refuse(steps)
        start = steps - self.decay_steps(steps)
        return warmed(self.warmup, decayed(self.shape, start=start, stop=steps, floor=self.min_ratio))


@dataclass(frozen=True, kw_only=True)
class MultiStep(Schedule):
    """Constant pieces: the full rate after the warm-up, and from each part of the run on another one (DeepSeek LLM, 2024)."""

    key_class: ClassVar = FREE

    at: tuple[Annotated[float, Gt(0), Lt(1)], ...] = (0.8, 0.9)
    """Where the pieces after the first one begin, as parts of the whole run, warm-up included; rounded to a step."""
    factors: tuple[Annotated[float, Gt(0)], ...] = (0.316, 0.1)
    """Factor of each of these pieces, relative to the full rate."""

    def __post_init__(self) -> None:
        if len(self.at) != len(self.factors):
            raise ValueError(f"factors has {len(self.factors)} numbers, but at has {len(self.at)}; give one factor for each")
        if any(later <= before for before, later in pairwise(self.at)):
            raise ValueError(f"at {list(self.at)} must ascend")

    def starts(self, steps: int) -> tuple[int, ...]:
        """The first step of each piece after the first one, in a run of `steps`."""
        return tuple(round(part * steps) for part in self.at)

    def faults(self, steps: int) -> list[Fault]:
        """Those of every schedule, and a piece that would begin inside the warm-up."""
        faults = super().faults(steps)
        starts = self.starts(steps)
        if not faults and starts and starts[0] < self.warmup:
            message = f"a piece begins at step {starts[0]}, within the warm-up of {self.warmup} steps (train.max_steps = {steps})"
            faults.append(Fault("schedule.at", message, hint="raise schedule.at or lower schedule.warmup"))
        return faults

    def build(self, steps: int) -> Factor:
        self.refuse(steps)
        return warmed(self.warmup, stepped(self.starts(steps), self.factors))
