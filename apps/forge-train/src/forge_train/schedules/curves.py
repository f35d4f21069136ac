"""Factors on the learning rate as functions of the step.

A run of S steps calls a factor with s = 0 ... S - 1. Progress p of a decay from `start` to `stop` is
(s - start) / (stop - start), so the first step of a decay still runs at the full rate and `floor` would be reached one
step after the last: no step of a run has the factor 0, not even with `floor` = 0.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from types import MappingProxyType

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
