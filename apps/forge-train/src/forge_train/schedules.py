"""Learning-rate schedules: their keys in `[schedule]`, and their formulas as functions of the step. No torch.

A run of S steps calls a factor with s = 0 ... S - 1. The progress of a decay from `start` to `stop` is
p = (s - start) / (stop - start). So the first step of a decay still has the full rate, and `floor` is reached one step after
the last step of the run: no step has the factor 0, not even with `floor` = 0.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt

from forge_core.component import FREE, Component
from forge_core.errors import ConfigError, Fault

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


Factor = Callable[[int], float]
"""Maps an optimizer step 0, 1, ... to the factor on every group's learning rate; never 0 for a step of the run."""

SHAPES: MappingProxyType[str, Callable[[float], float]] = MappingProxyType(
    {
        "linear": lambda p: 1.0 - p,
        "cosine": lambda p: 0.5 * (1.0 + math.cos(math.pi * p)),
        "sqrt": lambda p: math.sqrt(1.0 - p),
        "one_minus_sqrt": lambda p: 1.0 - math.sqrt(p),
        "rex": lambda p: (1.0 - p) / (0.5 + 0.5 * (1.0 - p)),
    }
)
"""Decay curves: map progress in [0, 1] to the share of the full rate; 1 at progress 0, 0 at progress 1."""


@dataclass(frozen=True, kw_only=True)
class Schedule(Component):
    """Base class of Forge's schedules: a linear warm-up, whose step s of W has the factor (s + 1) / W."""

    key_class: ClassVar = FREE

    warmup: Annotated[int, Ge(0)] = 0
    """Optimizer steps of the linear warm-up; 0 starts at the full rate."""

    def faults(self, steps: int) -> list[Fault]:
        """Returns the faults of this schedule for a run of `steps` optimizer steps."""
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
        """Raises a ConfigError if the schedule does not fit into `steps`."""
        if faults := self.faults(steps):
            raise ConfigError(faults)


@dataclass(frozen=True, kw_only=True)
class Unscheduled(Component):
    """The full rate at every step, f(s) = 1. It has no keys; use `constant` for a warm-up."""

    def build(self, steps: int) -> Factor:
        return constant


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """The full rate after the warm-up."""

    def build(self, steps: int) -> Factor:
        self.refuse(steps)
        return warmed(self.warmup, constant)


@dataclass(frozen=True, kw_only=True)
class Decaying(Schedule):
    """Base class of schedules that decay from the end of the warm-up to the end of the run."""

    def faults(self, steps: int) -> list[Fault]:
        """Returns the faults of every schedule, and a warm-up that leaves no step for the decay."""
        faults = super().faults(steps)
        if not faults and self.warmup == steps:
            message = f"a warm-up of {self.warmup} steps leaves no step for the decay (train.max_steps = {steps})"
            faults.append(Fault("schedule.warmup", message, hint="lower schedule.warmup, or choose name = 'constant'"))
        return faults


@dataclass(frozen=True, kw_only=True)
class Curve(Decaying):
    """Base class of schedules with one of `SHAPES` from the end of the warm-up to the end of the run."""

    key_class: ClassVar = FREE
    shape: ClassVar[str]

    min_ratio: Annotated[float, Ge(0), Le(1)] = 0.0
    """Factor that the curve reaches just after the last step, relative to the full rate."""

    def build(self, steps: int) -> Factor:
        self.refuse(steps)
        return warmed(self.warmup, decayed(self.shape, start=self.warmup, stop=steps, floor=self.min_ratio))


@dataclass(frozen=True, kw_only=True)
class Cosine(Curve):
    """Half a cosine, (1 + cos(pi p)) / 2, from the full rate after the warm-up to `min_ratio` (Loshchilov and Hutter, 2017)."""

    key_class: ClassVar = FREE
    shape: ClassVar[str] = "cosine"

    min_ratio: Annotated[float, Ge(0), Le(1)] = 0.1
    """Factor that the curve reaches just after the last step, relative to the full rate."""


@dataclass(frozen=True, kw_only=True)
class Linear(Curve):
    """A straight line, 1 - p, from the full rate after the warm-up to `min_ratio` at the end."""

    shape: ClassVar[str] = "linear"


@dataclass(frozen=True, kw_only=True)
class Rex(Curve):
    """(1 - p) / (1/2 + (1 - p)/2) over the progress p: above `linear` all the way (Chen et al., 2021, REX)."""

    shape: ClassVar[str] = "rex"


@dataclass(frozen=True, kw_only=True)
class InverseSqrt(Decaying):
    """Inverse square root of the step after the warm-up: sqrt(warmup / (s + 1)) (Vaswani et al., 2017), independent of the
    run's length."""

    key_class: ClassVar = FREE

    timescale: Annotated[int, Gt(0)] | None = None
    """Time scale t, in steps, of the curve sqrt(t / (t + n)), n steps after the last step at the full rate; by default `warmup`,
    at least 1."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[InverseSqrt]":
        """The curve of the paper, and a slower one."""
        return (cls(warmup=100), cls(warmup=100, timescale=400))

    def build(self, steps: int) -> Factor:
        self.refuse(steps)
        full = max(self.warmup, 1) - 1
        return warmed(self.warmup, falling(full, self.timescale or full + 1))


@dataclass(frozen=True, kw_only=True)
class CosineRestarts(Decaying):
    """Cosine decay in cycles, each of which restarts at the full rate (Loshchilov and Hutter, 2017, SGDR)."""

    key_class: ClassVar = FREE

    cycles: Annotated[int, Gt(0)] = 4
    """Number of cycles between the warm-up and the end of the run."""
    growth: Annotated[float, Ge(1)] = 1.0
    """Length of each cycle relative to the previous one (T_mult in the paper); borders are rounded to a step."""
    peak: Annotated[float, Gt(0), Le(1)] = 1.0
    """Peak rate of each cycle relative to the previous one; 1 as published."""
    min_ratio: Annotated[float, Ge(0), Le(1)] = 0.0
    """Factor that each cycle reaches just after its last step, relative to the full rate."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[CosineRestarts]":
        """Returns equal cycles, and growing cycles with decreasing peaks."""
        return (cls(warmup=50), cls(warmup=50, cycles=3, growth=2.0, peak=0.7, min_ratio=0.05))

    def __post_init__(self) -> None:
        if self.peak ** (self.cycles - 1) < self.min_ratio:
            raise ValueError(
                f"the last of {self.cycles} cycles begins at peak^{self.cycles - 1} = {self.peak ** (self.cycles - 1):g}, below "
                f"min_ratio = {self.min_ratio:g}; raise peak or lower min_ratio"
            )

    def borders(self, steps: int) -> tuple[int, ...]:
        """Returns the first step of each cycle, and the end of the last cycle, in a run of `steps`."""
        return cycles(self.warmup, steps, self.cycles, self.growth)

    def faults(self, steps: int) -> list[Fault]:
        """Returns the faults of every decay, and cycles without a step."""
        faults = super().faults(steps)
        if not faults and any(before == after for before, after in pairwise(self.borders(steps))):
            message = (
                f"{self.cycles} cycles, each {self.growth:g} times as long as the previous one, do not fit into the "
                f"{steps - self.warmup} steps after the warm-up (train.max_steps = {steps}): a cycle has no step"
            )
            faults.append(Fault("schedule.cycles", message, hint="lower schedule.cycles or schedule.growth"))
        return faults

    def build(self, steps: int) -> Factor:
        self.refuse(steps)
        return warmed(self.warmup, restarted(self.borders(steps), self.peak, self.min_ratio))


@dataclass(frozen=True, kw_only=True)
class Wsd(Schedule):
    """Warm-up, stable, decay: the full rate until the last part of the run (Hu et al., 2024, MiniCPM)."""

    key_class: ClassVar = FREE

    decay: Annotated[float, Gt(0), Le(1)] = 0.2
    """Length of the decay as a share of the whole run, warm-up included: 0.2 is the last fifth, rounded, at least one step."""
    shape: Literal["linear", "cosine", "sqrt", "one_minus_sqrt"] = "linear"
    """Curve of the decay at progress p: 1 - p, (1 + cos(pi p)) / 2, sqrt(1 - p), or 1 - sqrt(p) (Haegele et al., 2024)."""
    min_ratio: Annotated[float, Ge(0), Le(1)] = 0.0
    """Factor that the decay reaches just after the last step, relative to the full rate."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Wsd]":
        """Returns one schedule for each curve of the decay."""
        shapes = ("linear", "cosine", "sqrt", "one_minus_sqrt")
        return tuple(cls(warmup=50, shape=shape) for shape in shapes)

    def decay_steps(self, steps: int) -> int:
        """Returns the number of optimizer steps of the decay in a run of `steps`."""
        return max(1, round(self.decay * steps))

    def faults(self, steps: int) -> list[Fault]:
        """Returns the faults of every schedule, and a decay that would start inside the warm-up."""
        faults = super().faults(steps)
        decay = self.decay_steps(steps)
        if not faults and self.warmup + decay > steps:
            faults.append(
                Fault(
                    "schedule.decay",
                    f"{decay} steps of decay ({self.decay:g} of train.max_steps = {steps}) and schedule.warmup = {self.warmup} "
                    f"are {self.warmup + decay} steps, more than the run",
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
    """Piecewise constant: the full rate after the warm-up, then other rates from given points on (DeepSeek LLM, 2024)."""

    key_class: ClassVar = FREE

    at: tuple[Annotated[float, Gt(0), Lt(1)], ...] = (0.8, 0.9)
    """Begins of all pieces but the first, as shares of the whole run, warm-up included; rounded to a step."""
    factors: tuple[Annotated[float, Gt(0)], ...] = (0.316, 0.1)
    """Factor of each of these pieces on the full rate."""

    def __post_init__(self) -> None:
        if len(self.at) != len(self.factors):
            raise ValueError(f"factors has {len(self.factors)} numbers, but at has {len(self.at)}; set one factor for each")
        if any(later <= before for before, later in pairwise(self.at)):
            raise ValueError(f"at = {list(self.at)} must ascend; list the shares in increasing order")

    def starts(self, steps: int) -> tuple[int, ...]:
        """Returns the first step of each piece but the first, in a run of `steps`."""
        return tuple(round(part * steps) for part in self.at)

    def faults(self, steps: int) -> list[Fault]:
        """Returns the faults of every schedule, pieces that would begin inside the warm-up, and pieces without a step."""
        faults = super().faults(steps)
        starts = self.starts(steps)
        if not faults and starts and starts[0] < self.warmup:
            message = f"a piece begins at step {starts[0]}, within the warm-up of {self.warmup} steps (train.max_steps = {steps})"
            faults.append(Fault("schedule.at", message, hint="raise schedule.at or lower schedule.warmup"))
        for number, (begin, end) in enumerate(pairwise((0, *starts, steps))):
            if not faults and begin >= end:
                text = f"piece {number + 1} of {len(starts) + 1} would begin and end at step {begin}, so it has no step"
                hint = "set schedule.at further apart, train longer, or remove the piece"
                faults.append(Fault("schedule.at", f"{text} (train.max_steps = {steps})", hint=hint))
        return faults

    def build(self, steps: int) -> Factor:
        self.refuse(steps)
        return warmed(self.warmup, stepped(self.starts(steps), self.factors))


def constant(step: int) -> float:  # noqa: ARG001 (a factor is given the step)
    """Returns 1 at every step."""
    return 1.0


def decayed(shape: str, *, start: int, stop: int, floor: float) -> Factor:
    """Returns a factor: 1 before `start`, then floor + (1 - floor) * shape(p), and `floor` from `stop` on."""
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
    """Returns a factor: 1 before the first start, then `factors[i]` from step `starts[i]` on; starts are increasing."""

    def factor(step: int) -> float:
        return ([1.0, *factors])[bisect_right(starts, step)]

    return factor


def falling(full: int, timescale: int) -> Factor:
    """Returns a factor: sqrt(timescale / (timescale + s - full)) after step `full`, the last step at the full rate."""

    def factor(step: int) -> float:
        return math.sqrt(timescale / (timescale + max(0, step - full)))

    return factor


def cycles(start: int, stop: int, count: int, growth: float) -> tuple[int, ...]:
    """Returns the count + 1 borders of `count` cycles from `start` to `stop`, each `growth` times as long as the previous one.

    Border i is at start + round((stop - start) * (1 + g + ... + g^(i-1)) / (1 + g + ... + g^(count-1))).
    """
    lengths = [growth ** (cycle + 1 - count) for cycle in range(count)]  # as parts of the last one, which cannot overflow
    whole = math.fsum(lengths)
    return tuple(start + round((stop - start) * (math.fsum(lengths[:cycle]) / whole)) for cycle in range(count + 1))


def restarted(borders: Sequence[int], peak: float, floor: float) -> Factor:
    """Returns a factor: in cycle i, floor + (peak^i - floor) * (1 + cos(pi p)) / 2; after the last cycle, `floor`.

    Cycle i lasts from `borders[i]` to `borders[i + 1]`.
    """
    curve = SHAPES["cosine"]

    def factor(step: int) -> float:
        if step >= borders[-1]:
            return floor
        cycle = max(0, bisect_right(borders, step) - 1)
        begun, ended = borders[cycle], borders[cycle + 1]
        return floor + (peak**cycle - floor) * curve((step - begun) / (ended - begun))

    return factor


def warmed(warmup: int, after: Factor) -> Factor:
    """Returns a factor: (s + 1) / warmup for the first `warmup` steps, so that the first rate is not 0; then `after`."""

    def factor(step: int) -> float:
        return (step + 1) / warmup if step < warmup else after(step)

    return factor
