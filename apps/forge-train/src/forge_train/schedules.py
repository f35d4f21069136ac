"""Factor on the learning rate as a function of the optimizer step: pure arithmetic, no torch.

A run of S steps calls the function with s = 0 ... S - 1. Progress p of a decay from `start` to `stop` is
(s - start) / (stop - start), so the first step of a decay still runs at the full rate and `floor` would be reached one
step after the last: no step of a run has the factor 0, not even with `floor` = 0.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from types import MappingProxyType

Factor = Callable[[int], float]

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
