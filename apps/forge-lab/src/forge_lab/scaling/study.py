"""Returns a fit with intervals and predictions as plain data, and as parts of a page."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from forge_core.errors import DataError
from forge_lab.figures import FigureSeries, number, plot
from forge_lab.scaling.law import FEWEST_ON_FRONTIER, Fit, Frontier, Law, ObservedLosses, fit, fit_frontier, on_frontier
from forge_lab.scaling.runs import Counted, GatheredRuns
from forge_train.report.html import rows

LEVEL = 0.95
_FORMULA = "L(N, D) = E + A / N^alpha + B / D^beta"


def study(
    given: GatheredRuns, counted: Counted, budgets: Sequence[float] = (), resamples: int = 1000, seed: int = 0
) -> dict[str, Any]:
    """Fits both laws.

    Args:
        given: runs of the fit.
        counted: parameters counted as N, for the record.
        budgets: FLOPs to predict for; by default 1, 10 and 100 times those of the largest run.
        resamples: number of bootstrap resamples for the intervals.
        seed: seed of the resamples.

    Raises:
        DataError: the runs are too few or too similar, their losses do not fall, or the law has no optimal size.
    """
    losses = ObservedLosses.of([(run.parameters, run.tokens, run.loss) for run in given.runs])
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
    """Returns the central interval of the finite values, by interpolated percentiles; None if there are none."""
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
    """Yields a warning for each exponent whose interval contains 0, that is, for which the loss may not fall at all."""
    for name in ("alpha", "beta", "gamma"):
        item = constants.get(name)
        if item is not None and item["low"] is not None and item["low"] <= 0 <= item["high"]:
            yield (
                f"the {LEVEL:.0%} interval of {name}, {item['low']:.3g} to {item['high']:.3g}, contains 0: these runs do not "
                "show that the loss falls with it, so predictions that depend on it mean nothing"
            )


def _of_sound(found: Fit, of: Callable[[Law], float]) -> Sequence[float]:
    """Returns the quantity for every resample that has it; one in which a term does not fall has no optimum."""
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
        raise DataError(f"the fitted scaling law cannot be used: {cause}") from cause
    without = len(found.resampled) - len(sound)
    return {"flops": flops, "times_the_largest_run": flops / largest, **made, "resamples_without_optimum": without}


def _frontier(found: Frontier | None, runs: int) -> dict[str, Any]:
    formula = "L(C) = E' + k C^-gamma"
    if found is None:
        return {"formula": formula, "missing": f"{runs} runs are on the frontier, but {FEWEST_ON_FRONTIER} are needed"}
    return {
        "formula": formula,
        "E'": _measured(found.law.irreducible, [law.irreducible for law in found.resampled]),
        "k": _measured(found.law.k, [law.k for law in found.resampled]),
        "gamma": _measured(found.law.gamma, [law.gamma for law in found.resampled]),
        "runs": len(found.runs),
    }


def spread_points(low: float, high: float, count: int) -> list[float]:
    """Returns `count` numbers from low to high, evenly spaced in the logarithm."""
    ratio = (high / low) ** (1 / (count - 1))
    return [low * ratio**index for index in range(count)]


LAW, PAGE = "fit.json", "fit.html"
"""Files that `forge-train fit` writes; for a single sweep, into its directory."""
_POINTS = 60
_MEANING = {
    "E": "irreducible loss",
    "A": "constant of the parameters",
    "B": "constant of the tokens",
    "alpha": "exponent of the parameters",
    "beta": "exponent of the tokens",
    "parameters_exponent": "a: the best N grows as C^a",
    "tokens_exponent": "b: the best D grows as C^b",
    "loss_exponent": "exponent of the compute in the best loss",
}


def page_parts(found: Mapping[str, Any]) -> list[str]:
    """Returns the HTML parts of a result of `forge_lab.scaling.study.study`."""
    law = law_of(found)
    counted = {"all": "all", "blocks": "without embedding and head", "active": "used by one token"}[found["parameters_counted"]]
    how = found["intervals"]
    note = (
        f"{found['formula']}, fitted to {len(found['runs'])} runs: {found['metric']} in nats per token, N parameters "
        f"({counted}), D tokens, {found['flops']}. "
        f"Intervals: {how['level']:.0%}, {how['method']} ({how['resamples']}, seed {how['seed']})."
    )
    return [
        "<h2>Scaling law</h2>",
        f'<p class="dim">{escape(note)}</p>',
        *(f'<p class="warnings">{escape(each)}</p>' for each in found.get("warnings", ())),
        rows(["", "value", "from", "to", ""], _constants_table(found), numbers=range(1, 4)),
        '<div class="charts">',
        *(_against_compute(found, law), _over_tokens(found, law), _observed(found), _residuals(found)),
        "</div>",
        "<h2>Compute-optimal sizes</h2>",
        rows(
            ["FLOPs", "times the largest run", "parameters", "tokens", "tokens per parameter", "loss"],
            [_budget_row(item) for item in found["budgets"]],
            numbers=range(6),
        ),
        '<p class="dim">Predictions far beyond the largest run are extrapolations; the intervals do not include effects that no '
        "run has shown.</p>",
        _left_out(found["left_out"]),
    ]


def page_parts_in(directory: Path) -> list[str]:
    """Returns the HTML parts of the law fitted to a sweep; empty if none was fitted."""
    path = directory / LAW
    return page_parts(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else []


def law_of(found: Mapping[str, Any]) -> Law:
    """Returns the law in a result of `study`."""
    given = found["law"]
    return Law(*(given[name]["value"] for name in ("E", "A", "B", "alpha", "beta")))


def with_interval(item: Mapping[str, Any]) -> str:
    """Formats a value with its interval: `1.69 (1.52 to 1.83)`."""
    if item["low"] is None:
        return number(item["value"])
    return f"{number(item['value'])} ({number(item['low'])} to {number(item['high'])})"


def _constants_table(found: Mapping[str, Any]) -> list[list[Any]]:
    def row(name: str, item: Mapping[str, Any], meaning: str) -> list[Any]:
        shown = ["" if item[end] is None else f"{item[end]:.5g}" for end in ("value", "low", "high")]
        return [name, *shown, meaning]

    table = [row(name.replace("_", " "), found["law"][name], meaning) for name, meaning in _MEANING.items()]
    frontier = found["frontier"]
    if "missing" in frontier:
        return [*table, [frontier["formula"], "", "", "", frontier["missing"]]]
    of = f"of {frontier['formula']}, fitted to the {frontier['runs']} runs on the frontier"
    return [*table, *(row(name, frontier[name], of) for name in ("E'", "k", "gamma"))]


def _against_compute(found: Mapping[str, Any], law: Law) -> str:
    """Plots every run, the best loss by the law, and the power law through the frontier."""
    flops = [run["flops"] for run in found["runs"]]
    line = spread_points(min(flops), max([*flops, *(item["flops"] for item in found["budgets"])]), _POINTS)
    series = [
        FigureSeries("runs", [(run["flops"], run["loss"]) for run in found["runs"]]),
        FigureSeries("best by the law", [(at, law.best_loss(at)) for at in line], line=True),
    ]
    frontier = found["frontier"]
    if "missing" not in frontier:
        e, k, gamma = (frontier[name]["value"] for name in ("E'", "k", "gamma"))
        series.append(FigureSeries("frontier", [(at, e + k * at**-gamma) for at in line], line=True))
    return plot("Loss against compute", series, x="FLOPs", y="nats per token")


def _over_tokens(found: Mapping[str, Any], law: Law) -> str:
    """Plots the runs of each size as dots, and the law at that size as a line of the same color."""
    sizes = sorted({run["parameters"] for run in found["runs"]})
    tokens = [run["tokens"] for run in found["runs"]]
    line = spread_points(min(tokens), max(tokens), _POINTS)
    series = []
    for color, size in enumerate(sizes):
        seen = [(run["tokens"], run["loss"]) for run in found["runs"] if run["parameters"] == size]
        series.append(FigureSeries(f"N = {number(size)}", seen, color=color))
        series.append(FigureSeries("", [(at, law.loss(size, at)) for at in line], line=True, color=color))
    return plot("Loss against tokens, by size", series, x="tokens", y="nats per token")


def _observed(found: Mapping[str, Any]) -> str:
    pairs = [(run["loss"], run["fitted"]) for run in found["runs"]]
    ends = [min(map(min, pairs)), max(map(max, pairs))]
    series = [FigureSeries("runs", pairs), FigureSeries("equal", [(end, end) for end in ends], line=True)]
    return plot("Fitted against observed", series, x="observed, nats per token", y="fitted", log_x=False, log_y=False)


def _residuals(found: Mapping[str, Any]) -> str:
    series = [FigureSeries("", [(run["flops"], 100 * run["residual"]) for run in found["runs"]])]
    return plot("Residuals", series, x="FLOPs", y="observed above fitted, %", log_y=False)


def _budget_row(item: Mapping[str, Any]) -> list[str]:
    names = ("parameters", "tokens", "tokens_per_parameter", "loss")
    return [number(item["flops"]), number(item["times_the_largest_run"]), *(with_interval(item[name]) for name in names)]


def _left_out(items: Sequence[Mapping[str, str]]) -> str:
    if not items:
        return ""
    table = [[item["name"], item["why"]] for item in items]
    return f"<details><summary>{len(items)} runs are left out</summary>{rows(['run', 'why'], table)}</details>"
