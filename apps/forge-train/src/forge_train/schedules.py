"""Learning-rate schedules: their keys in `[schedule]`, and their formulas as functions of the step. No torch.

A run of S steps calls a factor with s = 0 ... S - 1. The progress of a decay from `start` to `stop` is
p = (s - start) / (stop - start). So the first step of a decay still has the full rate, and `floor` would be reached one step
after the last one: no step of a run has the factor 0, not even with `floor` = 0.
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
"""Optimizer step 0, 1, ... -> factor on every group's learning rate; never 0 for a step of the run."""

SHAPES: MappingProxyType[str, Callable[[float], float]] = MappingProxyType(
    {
        "linear": lambda p: 1.0 - p,
        "cosine": lambda p: 0.5 * (1.0 + math.cos(math.pi * p)),
        "sqrt": lambda p: math.sqrt(1.0 - p),
        "one_minus_sqrt": lambda p: 1.0 - math.sqrt(p),
        "rex": lambda p: (1.0 - p) / (0.5 + 0.5 * (1.0 - p)),
    }
)
"""Decay curves: progress in [0, 1] -> what is left of the full rate; 1 at 0, 0 at 1."""


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
class Unscheduled(Component):
    """The optimizer's own rate at every step: f(s) = 1. It has no key; with a warm-up it is `constant`."""

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
    """A schedule that decays from the end of the warm-up to the end of the run."""

    def faults(self, steps: int) -> list[Fault]:
        """Those of every schedule, and a warm-up that leaves no step for the decay."""
        faults = super().faults(steps)
        if not faults and self.warmup == steps:
            message = f"a warm-up of {self.warmup} steps leaves no step for the decay (train.max_steps = {steps})"
            faults.append(Fault("schedule.warmup", message, hint="lower schedule.warmup, or choose name = 'constant'"))
        return faults


@dataclass(frozen=True, kw_only=True)
class Curve(Decaying):
    """One of `SHAPES` over the progress p from the end of the warm-up to the end of the run."""

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
    """After the warm-up, 1 / sqrt of the step: sqrt(warmup / (s + 1)) (Vaswani et al., 2017). It does not know the run's end."""

    key_class: ClassVar = FREE

    timescale: Annotated[int, Gt(0)] | None = None
    """Steps t of the curve sqrt(t / (t + n)), n steps after the last one of the full rate; none takes `warmup`, at least 1."""

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
    """Cosines in cycles, each back at the full rate at its first step (Loshchilov and Hutter, 2017, SGDR)."""

    key_class: ClassVar = FREE

    cycles: Annotated[int, Gt(0)] = 4
    """Cycles between the warm-up and the end of the run, which is the end of the last one."""
    growth: Annotated[float, Ge(1)] = 1.0
    """How many times as long as the cycle before each one is (the paper's T_mult); borders are rounded to a step."""
    peak: Annotated[float, Gt(0), Le(1)] = 1.0
    """Factor of each restart's rate on that of the restart before; 1 as published."""
    min_ratio: Annotated[float, Ge(0), Le(1)] = 0.0
    """Factor that each cycle reaches just after its last step, relative to the full rate."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[CosineRestarts]":
        """Even cycles, and cycles that grow while their peaks sink."""
        return (cls(warmup=50), cls(warmup=50, cycles=3, growth=2.0, peak=0.7, min_ratio=0.05))

    def __post_init__(self) -> None:
        if self.peak ** (self.cycles - 1) < self.min_ratio:
            raise ValueError(
                f"the last of {self.cycles} cycles begins at peak^{self.cycles - 1} = {self.peak ** (self.cycles - 1):g}, below "
                f"min_ratio = {self.min_ratio:g}; raise peak or lower min_ratio"
            )

    def borders(self, steps: int) -> tuple[int, ...]:
        """The first step of each cycle, and the end of the last one, in a run of `steps`."""
        return cycles(self.warmup, steps, self.cycles, self.growth)

    def faults(self, steps: int) -> list[Fault]:
        """Those of every decay, and a cycle without a step."""
        faults = super().faults(steps)
        if not faults and any(before == after for before, after in pairwise(self.borders(steps))):
            message = (
                f"{self.cycles} cycles, each {self.growth:g} times as long as the one before, do not fit in the "
                f"{steps - self.warmup} steps after the warm-up (train.max_steps = {steps}): one has no step"
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
    """Part of the whole run, warm-up included, that the decay takes: 0.2 is its last fifth, rounded, at least one step."""
    shape: Literal["linear", "cosine", "sqrt", "one_minus_sqrt"] = "linear"
    """Curve of the decay over its progress p: 1 - p, (1 + cos(pi p)) / 2, sqrt(1 - p), or 1 - sqrt(p) (Haegele et al., 2024)."""
    min_ratio: Annotated[float, Ge(0), Le(1)] = 0.0
    """Factor that the decay reaches just after the last step, relative to the full rate."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Wsd]":
        """One for each curve of the decay."""
        shapes = ("linear", "cosine", "sqrt", "one_minus_sqrt")
        return tuple(cls(warmup=50, shape=shape) for shape in shapes)

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
        """Those of every schedule, a piece that would begin inside the warm-up, and one that has no step of the run."""
        faults = super().faults(steps)
        starts = self.starts(steps)
        if not faults and starts and starts[0] < self.warmup:
            message = f"a piece begins at step {starts[0]}, within the warm-up of {self.warmup} steps (train.max_steps = {steps})"
            faults.append(Fault("schedule.at", message, hint="raise schedule.at or lower schedule.warmup"))
        for number, (begin, end) in enumerate(pairwise((0, *starts, steps))):
            if not faults and begin >= end:
                text = f"piece {number + 1} of {len(starts) + 1} would begin at step {begin} and end there, so it never runs"
                hint = "set schedule.at further apart, train longer, or leave the piece out"
                faults.append(Fault("schedule.at", f"{text} (train.max_steps = {steps})", hint=hint))
        return faults

    def build(self, steps: int) -> Factor:
        self.refuse(steps)
        return warmed(self.warmup, stepped(self.starts(steps), self.factors))


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


def falling(full: int, timescale: int) -> Factor:
    """sqrt(timescale / (timescale + s - full)) after step `full`, the last one of the full rate."""

    def factor(step: int) -> float:
        return math.sqrt(timescale / (timescale + max(0, step - full)))

    return factor


def cycles(start: int, stop: int, count: int, growth: float) -> tuple[int, ...]:
    """Borders of `count` cycles from `start` to `stop`, each `growth` times as long as the one before: count + 1 steps.

    Border i is at start + round((stop - start) * (1 + g + ... + g^(i-1)) / (1 + g + ... + g^(count-1))).
    """
    lengths = [growth ** (cycle + 1 - count) for cycle in range(count)]  # as parts of the last one, which cannot overflow
    whole = math.fsum(lengths)
    return tuple(start + round((stop - start) * (math.fsum(lengths[:cycle]) / whole)) for cycle in range(count + 1))


def restarted(borders: Sequence[int], peak: float, floor: float) -> Factor:
    """In cycle i, whose length ends at `borders[i + 1]`: floor + (peak^i - floor) * (1 + cos(pi p)) / 2; then `floor`."""
    curve = SHAPES["cosine"]

    def factor(step: int) -> float:
        if step >= borders[-1]:
            return floor
        cycle = max(0, bisect_right(borders, step) - 1)
        begun, ended = borders[cycle], borders[cycle + 1]
        return floor + (peak**cycle - floor) * curve((step - begun) / (ended - begun))

    return factor


def warmed(warmup: int, after: Factor) -> Factor:
    """(s + 1) / warmup for the first `warmup` steps, so that the first is not lost at rate 0; then `after`."""

    def factor(step: int) -> float:
        return (step + 1) / warmup if step < warmup else after(step)

    return factor
