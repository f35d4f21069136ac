"""Fewer points for the same curve, and numbers as short JSON."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

POINTS = 2000
"""Points of a curve at most, but for one more per gap; a page with many curves has fewer, down to `FEWEST`."""
FEWEST = 250
ALL_POINTS = 200_000
"""Points that the curves of a page share: at about 15 bytes each, 3 MB."""


@dataclass
class Series:
    """One metric over the run: steps that grow, and a value at each; one that is not finite is a gap."""

    steps: "array[int]" = field(default_factory=lambda: array("q"))
    values: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, step: int, value: float) -> None:
        """Appends; of two values at one step the later one counts."""
        if self.steps and self.steps[-1] == step:
            self.values[-1] = value
        else:
            self.steps.append(step)
            self.values.append(value)

    def cut(self, step: int) -> None:
        """Forgets what is later than `step`."""
        while self.steps and self.steps[-1] > step:
            self.steps.pop()
            self.values.pop()

    @property
    def last(self) -> float:
        """The newest value; NaN without any."""
        return self.values[-1] if self.values else math.nan


def limit(curves: int) -> int:
    """Points that each of so many curves may have."""
    return max(FEWEST, min(POINTS, ALL_POINTS // max(curves, 1)))


def thin(values: "array[float]", most: int) -> list[int]:
    """Indices of the points to draw: all, or of each of `most / 2` equal stretches the lowest and highest one, so that no extreme
    is lost; both ends always; and the first value that is not finite in a stretch, which keeps the gap."""
    if len(values) <= most:
        return list(range(len(values)))
    kept = {0, len(values) - 1}
    for start, stop in stretches(len(values), most):
        there = finite(values[start:stop])
        if len(there) < stop - start:
            kept.add(next(at for at in range(start, stop) if not math.isfinite(values[at])))
        if there:
            kept.update(values.index(extreme, start, stop) for extreme in (min(there), max(there)))
    return sorted(kept)


def finite(values: "array[float]") -> Sequence[float]:
    """Those that are numbers: all of them, as a rule."""
    return values if math.isfinite(sum(values)) else [value for value in values if math.isfinite(value)]


def stretches(count: int, most: int) -> list[tuple[int, int]]:
    """(start, stop) of `most / 2` equal stretches of `count` points, of which none is empty."""
    number = max(1, min(most // 2, count))
    return [(part * count // number, (part + 1) * count // number) for part in range(number)]


def means(series: Series, most: int) -> tuple[list[float], list[float]]:
    """Mean step and mean value of each stretch: what smoothing begins from, as lowest and highest would not be a fair sample."""
    steps, values = [], []
    for start, stop in stretches(len(series.steps), most):
        there, at = series.values[start:stop], series.steps[start:stop]
        if not math.isfinite(sum(there)):
            whole = [number for number, value in enumerate(there) if math.isfinite(value)]
            there, at = [there[number] for number in whole], [at[number] for number in whole]
        if there:
            steps.append(sum(at) / len(at))
            values.append(math.fsum(there) / len(there))
    return steps, values


def short(value: float) -> float | int | None:
    """Six significant digits; None for what JSON has no number for. A whole number stays whole."""
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.6g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 2**53 else rounded
