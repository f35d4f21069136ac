"""Fits the free constants of the time model to measured steps.

The constants start at known values and move only as far as measurements demand: the loss is the mean of
|log(modeled / measured)| plus a penalty for each constant that leaves its start. The absolute value makes the fit robust against
single runs that something else slowed down. A coordinate search finds the minimum; it needs no derivatives, and ten constants and
tens of runs take less than a minute.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from statistics import mean, median

from forge_core.errors import ForgeError
from forge_parallel.timing.step_time import FREE, Efficiency, ErrorSummary

Predict = Callable[[Efficiency], float]
"""Modeled tokens per second of one GPU with some constants."""

MOST = 0.95
"""Largest part of a peak that a constant may become."""

RATIOS = frozenset({"eager", "contention"})
"""Constants that are not parts of a peak."""


@dataclass(frozen=True)
class Observation:
    """A measured run: its `name`, tokens per second of one GPU, and the model of it."""

    name: str
    measured: float
    predict: Predict

    def error(self, efficiency: Efficiency) -> float:
        """Returns the relative error of the modeled speed: 0.1 is 10 % too fast."""
        return self.predict(efficiency) / self.measured - 1


def score(observations: Collection[Observation], efficiency: Efficiency) -> ErrorSummary:
    """Returns the errors of some constants. There must be an observation."""
    errors = [abs(observation.error(efficiency)) for observation in observations]
    return ErrorSummary(len(errors), median(errors), max(errors))


def fit(observations: Sequence[Observation], start: Efficiency, *, penalty: float = 0.05, width: float = 0.3) -> Efficiency:
    """Returns the constants that fit `observations` best.

    Args:
        observations: measured runs.
        start: known constants; those without influence on these runs keep their values.
        penalty: weight of the mean squared distance from `start`, counted in widths.
        width: distance on a logarithmic scale that costs `penalty` if one constant of all moves by it.

    Raises:
        ForgeError: there are no observations, or a speed is not positive.
    """
    if not observations:
        raise ForgeError("there is nothing to calibrate with: no measured run")
    for observation in observations:
        if not observation.measured > 0:
            raise ForgeError(f"{observation.name}: {observation.measured} tokens per second is not a speed")

    def loss(efficiency: Efficiency) -> float:
        errors = mean(abs(log(one.predict(efficiency) / one.measured)) for one in observations)
        moved = mean((log(getattr(efficiency, name) / getattr(start, name)) / width) ** 2 for name in FREE)
        return errors + penalty * moved

    best, least, step = replace(start, error=None), loss(start), 0.2
    while step > 0.01:
        improved = False
        for name in FREE:
            for factor in (exp(step), exp(-step)):
                value = getattr(best, name) * factor
                tried = replace(best, **{name: value})
                if (value <= MOST or name in RATIOS) and (found := loss(tried)) < least - 1e-9:
                    best, least, improved = tried, found, True
        if not improved:
            step /= 2
    return best


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns Spearman's rank correlation of two sequences, with mean ranks for ties; 1 for a single pair.

    Raises:
        ForgeError: the sequences differ in length or are empty.
    """
    if len(first) != len(second) or not first:
        raise ForgeError(f"ranks need two sequences of one length, got {len(first)} and {len(second)} values")
    one, two = _ranks(first), _ranks(second)
    center = mean(one)
    products = sum((a - center) * (b - center) for a, b in zip(one, two, strict=True))
    squares = (sum((a - center) ** 2 for a in one) * sum((b - center) ** 2 for b in two)) ** 0.5
    return products / squares if squares else 1.0


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(other < value for other in values) + (sum(other == value for other in values) + 1) / 2 for value in values]
