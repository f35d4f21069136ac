"""A scaling law as parts of a page: what was fitted, how well, and what it predicts."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from forge_train.report.html import rows
from forge_train.scaling.law import Law
from forge_train.scaling.study import spread
from forge_train.sweep.plot import Series, number, plot

LAW, PAGE = "fit.json", "fit.html"
"""What `forge-train fit` writes, into the directory of a sweep for one."""
_POINTS = 60
_MEANING = {
    "E": "loss that neither parameters nor tokens lower",
    "A": "of the parameters",
    "B": "of the tokens",
    "alpha": "exponent of the parameters",
    "beta": "exponent of the tokens",
    "parameters_exponent": "a: the best N grows as C^a",
    "tokens_exponent": "b: the best D grows as C^b",
    "loss_exponent": "of the compute, in the best loss",
}


def parts(found: Mapping[str, Any]) -> list[str]:
    """HTML of what `forge_train.scaling.study.study` found."""
    law = law_of(found)
    counted = {"all": "all", "blocks": "without token table and head", "active": "used by one token"}[found["parameters_counted"]]
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
        '<p class="dim">What lies far beyond the largest run is an extrapolation; the intervals know nothing of changes that no '
        "run has seen.</p>",
        _left_out(found["left_out"]),
    ]


def kept_in(directory: Path) -> list[str]:
    """The parts of the law that was fitted to a sweep; none before."""
    path = directory / LAW
    return parts(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else []


def law_of(found: Mapping[str, Any]) -> Law:
    """The law of a document."""
    given = found["law"]
    return Law(*(given[name]["value"] for name in ("E", "A", "B", "alpha", "beta")))


def measured(item: Mapping[str, Any]) -> str:
    """`1.69 (1.52 to 1.83)`"""
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
    of = f"of {frontier['formula']}, through the {frontier['runs']} runs on the frontier"
    return [*table, *(row(name, frontier[name], of) for name in ("E'", "k", "gamma"))]


def _against_compute(found: Mapping[str, Any], law: Law) -> str:
    """Every run, the law's best loss, and the power law through the frontier."""
    flops = [run["flops"] for run in found["runs"]]
    line = spread(min(flops), max([*flops, *(item["flops"] for item in found["budgets"])]), _POINTS)
    series = [
        Series("runs", [(run["flops"], run["loss"]) for run in found["runs"]]),
        Series("best by the law", [(at, law.best_loss(at)) for at in line], line=True),
    ]
    frontier = found["frontier"]
    if "missing" not in frontier:
        e, k, gamma = (frontier[name]["value"] for name in ("E'", "k", "gamma"))
        series.append(Series("frontier", [(at, e + k * at**-gamma) for at in line], line=True))
    return plot("Loss against compute", series, x="FLOPs", y="nats per token")


def _over_tokens(found: Mapping[str, Any], law: Law) -> str:
    """Runs of each size as dots, the law at that size as a line of the same color."""
    sizes = sorted({run["parameters"] for run in found["runs"]})
    tokens = [run["tokens"] for run in found["runs"]]
    line = spread(min(tokens), max(tokens), _POINTS)
    series = []
    for color, size in enumerate(sizes):
        seen = [(run["tokens"], run["loss"]) for run in found["runs"] if run["parameters"] == size]
        series.append(Series(f"N = {number(size)}", seen, color=color))
        series.append(Series("", [(at, law.loss(size, at)) for at in line], line=True, color=color))
    return plot("Loss against tokens, by size", series, x="tokens", y="nats per token")


def _observed(found: Mapping[str, Any]) -> str:
    pairs = [(run["loss"], run["fitted"]) for run in found["runs"]]
    ends = [min(map(min, pairs)), max(map(max, pairs))]
    series = [Series("runs", pairs), Series("equal", [(end, end) for end in ends], line=True)]
    return plot("Fitted against observed", series, x="observed, nats per token", y="fitted", log_x=False, log_y=False)


def _residuals(found: Mapping[str, Any]) -> str:
    series = [Series("", [(run["flops"], 100 * run["residual"]) for run in found["runs"]])]
    return plot("Residuals", series, x="FLOPs", y="observed above fitted, %", log_y=False)


def _budget_row(item: Mapping[str, Any]) -> list[str]:
    names = ("parameters", "tokens", "tokens_per_parameter", "loss")
    return [number(item["flops"]), number(item["times_the_largest_run"]), *(measured(item[name]) for name in names)]


def _left_out(items: Sequence[Mapping[str, str]]) -> str:
    if not items:
        return ""
    table = [[item["name"], item["why"]] for item in items]
    return f"<details><summary>{len(items)} runs that do not count</summary>{rows(['run', 'why'], table)}</details>"
