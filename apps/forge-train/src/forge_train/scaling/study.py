"""A fit with its intervals and predictions as one JSON document, which the page draws."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from forge_core.errors import DataError
from forge_train.scaling.fit import Fit, Losses, fit
from forge_train.scaling.frontier import FEWEST_ON_FRONTIER, Frontier, fit_frontier, on_frontier
from forge_train.scaling.law import Law
from forge_train.scaling.runs import Counted, Gathered

LEVEL = 0.95
_FORMULA = "L(N, D) = E + A / N^alpha + B / D^beta"


def study(
    given: Gathered, counted: Counted, budgets: Sequence[float] = (), resamples: int = 1000, seed: int = 0
) -> dict[str, Any]:
    """Fits both laws.

    Args:
        given: the runs.
        counted: which of their parameters are N, for the record.
        budgets: FLOPs to predict for; by default those of the largest run, and 10 and 100 times as much.
        resamples: of the runs, for the intervals.
        seed: of these.

    Raises:
        DataError: the runs are too few, too alike, or do not fall; or the law has no best size.
    """
    losses = Losses.of([(run.parameters, run.tokens, run.loss) for run in given.runs])
    found = fit(losses, resamples, seed)
    largest = float(losses.flops.max())
    frontier = fit_frontier(losses, resamples, seed)
    constants, power = _constants(found), _frontier(frontier, len(on_frontier(losses.flops, losses.losses)))
    return {
        "formula": _FORMULA,
        "metric": given.metric,
        "parameters_counted": counted,
        "flops": "C = 6 N D",
        "intervals": {"level": LEVEL, "resamples": resamples, "seed": seed, "method": "percentiles over resamples of the runs"},
        "minimization": {"objective": found.objective, "starts": found.starts[0], "led_here": found.starts[1]},
        "chance": {"method": "permutations of Freedman and Lane", "parameters": found.chance[0], "tokens": found.chance[1]},
        "law": constants,
        "frontier": power,
        "warnings": [*_warnings({name: constants[name] for name in ("alpha", "beta")}), *_warnings(power)],
        "budgets": [_budget(found, flops, largest) for flops in budgets or (largest, 10 * largest, 100 * largest)],
        "runs": [
            {
                "name": run.name,
                "parameters": run.parameters,
                "tokens": run.tokens,
                "flops": 6.0 * run.parameters * run.tokens,
                "loss": run.loss,
                "fitted": (fitted := found.law.loss(run.parameters, run.tokens)),
                "residual": math.log(run.loss / fitted),
                "on_frontier": frontier is not None and index in frontier.runs,
            }
            for index, run in enumerate(given.runs)
        ],
        "left_out": [{"name": name, "why": why} for name, why in given.left_out],
    }


def interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float] | None:
    """Percentiles that leave out as many values on either side, interpolated; None of no value."""
    ordered = sorted(value for value in values if math.isfinite(value))
    if not ordered:
        return None
    return _percentile(ordered, (1 - level) / 2), _percentile(ordered, (1 + level) / 2)


def _percentile(ordered: Sequence[float], part: float) -> float:
    place = part * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def _measured(value: float, resampled: Sequence[float]) -> dict[str, float | None]:
    low, high = interval(resampled) or (None, None)
    return {"value": value, "low": low, "high": high}


def _constants(found: Fit) -> dict[str, Any]:
    shown: dict[str, Callable[[Law], float]] = {
        "E": lambda law: law.irreducible,
        "A": lambda law: law.a,
        "B": lambda law: law.b,
        "alpha": lambda law: law.alpha,
        "beta": lambda law: law.beta,
        "parameters_exponent": lambda law: law.parameters_exponent,
        "tokens_exponent": lambda law: law.tokens_exponent,
        "loss_exponent": lambda law: law.loss_exponent,
    }
    return {name: _measured(of(found.law), list(_of_sound(found, of))) for name, of in shown.items()}


def _warnings(constants: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each exponent whose interval has 0, where the loss would not fall at all."""
    for name in ("alpha", "beta", "gamma"):
        item = constants.get(name)
        if item is not None and item["low"] is not None and item["low"] <= 0 <= item["high"]:
            yield (
                f"the {LEVEL:.0%} interval of {name}, {item['low']:.3g} to {item['high']:.3g}, contains 0: these runs do not "
                "show that the loss falls at all this way, and what follows from it means nothing"
            )


def _of_sound(found: Fit, of: Callable[[Law], float]) -> Sequence[float]:
    """A quantity in every resample that has it: one in which a term does not fall has no optimum."""
    values = []
    for law in found.resampled:
        try:
            values.append(of(law))
        except ArithmeticError:
            continue
    return [value for value in values if isinstance(value, float)]  # roots of negative numbers are complex


def _budget(found: Fit, flops: float, largest: float) -> dict[str, Any]:
    sound = [law for law in found.resampled if law.alpha > 0 and law.beta > 0]
    rest = replace(found, resampled=tuple(sound))
    quantities: dict[str, Callable[[Law], float]] = {
        "parameters": lambda law: law.best_parameters(flops),
        "tokens": lambda law: law.best_tokens(flops),
        "tokens_per_parameter": lambda law: law.best_tokens(flops) / law.best_parameters(flops),
        "loss": lambda law: law.best_loss(flops),
    }
    try:
        made = {name: _measured(of(found.law), _of_sound(rest, of)) for name, of in quantities.items()}
    except ArithmeticError as cause:
        raise DataError(f"a scaling law was fitted that cannot be used: {cause}") from cause
    without = len(found.resampled) - len(sound)
    return {"flops": flops, "times_the_largest_run": flops / largest, **made, "resamples_without_optimum": without}


def _frontier(found: Frontier | None, runs: int) -> dict[str, Any]:
    formula = "L(C) = E' + k C^-gamma"
    if found is None:
        return {"formula": formula, "missing": f"{runs} runs are on the frontier, and {FEWEST_ON_FRONTIER} are needed"}
    return {
        "formula": formula,
        "E'": _measured(found.law.irreducible, [law.irreducible for law in found.resampled]),
        "k": _measured(found.law.k, [law.k for law in found.resampled]),
        "gamma": _measured(found.law.gamma, [law.gamma for law in found.resampled]),
        "runs": len(found.runs),
    }


def spread(low: float, high: float, count: int) -> list[float]:
    """`count` numbers from low to high, evenly in the logarithm."""
    ratio = (high / low) ** (1 / (count - 1))
    return [low * ratio**index for index in range(count)]
