"""Results of a sweep: ranked points, the effect of each key, and `index.html`."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from forge_core.config.toml import read_toml, value_text
from forge_core.files import replace_file
from forge_core.registry import Registry
from forge_core.terminal import duration
from forge_lab.figures import FigureSeries, number, plot
from forge_lab.sweep.execution import outcomes
from forge_lab.sweep.files import Outcome
from forge_lab.sweep.grid import Sweep
from forge_lab.sweep.points import SEED, Point
from forge_train.plan import RunSize, run_size
from forge_train.recipe.load import load_recipe
from forge_train.report.html import document, rows
from forge_train.report.page import REPORT

LINES, BEST = "results.jsonl", "best.toml"
_BINS = 4
"""Number of equally sized groups into which the values of a range are binned."""


@dataclass(frozen=True)
class RankedPoint:
    """A point with its outcome. `rank` counts from 1; it is None if the point has no value."""

    point: Point
    outcome: Outcome
    size: RunSize
    rank: int | None


@dataclass(frozen=True)
class SeedGroup:
    """Runs that differ only in the seed. `deviation` is the sample standard deviation of their values; None for a single run."""

    name: str
    values: Mapping[str, Any]
    runs: int
    mean: float
    deviation: float | None


@dataclass(frozen=True)
class Effect:
    """Mean and best result of the runs that share a value, or a bin of values, of one key."""

    key: str
    value: str
    runs: int
    mean: float
    best: float


@dataclass(frozen=True)
class Results:
    """A sweep's results.

    Attributes:
        results: all points: finished ones by value, then those that reached the highest rung; those without a value last.
        settings: groups of finished points that differ only in the seed, best first.
        effects: effects per key, in the order of the sweep's file, over finished points, or over all with a value if none
            finished.
    """

    results: tuple[RankedPoint, ...]
    settings: tuple[SeedGroup, ...]
    effects: tuple[Effect, ...]

    @property
    def best(self) -> RankedPoint | None:
        """The best run of the best setting."""
        best = self.settings[0].name if self.settings else None
        return next((item for item in self.results if item.outcome.status == "finished" and item.point.setting == best), None)


def collect_results(sweep: Sweep) -> Results:
    """Reads the outcome of every point."""
    found = outcomes(sweep)
    sign = 1 if sweep.grid.search.mode == "min" else -1

    def place(index: int) -> tuple[int, int, float, int]:
        outcome = found[sweep.points[index].name]
        if outcome.value is None or outcome.status in ("failed", "diverged"):
            return (2, 0, 0.0, index)
        value = sign * outcome.value
        return (0, 0, value, index) if outcome.status == "finished" else (1, -outcome.step, value, index)

    results = []
    for position, index in enumerate(sorted(range(len(sweep.points)), key=place), 1):
        point = sweep.points[index]
        rank = None if place(index)[0] == 2 else position
        results.append(RankedPoint(point, found[point.name], run_size(sweep.resolved[point.name].job), rank))
    finished = [item for item in results if item.rank is not None and item.outcome.status == "finished"]
    return Results(
        tuple(results),
        tuple(sorted(_settings(finished), key=lambda setting: sign * setting.mean)),
        tuple(_effects(finished or [item for item in results if item.rank is not None], sign)),
    )


def write_results(sweep: Sweep, found: Results, registry: Registry | None = None) -> None:
    """Writes `results.jsonl`, one line per point, and `best.toml`, a complete recipe of the best point."""
    lines = "".join(json.dumps(line_of(item, sweep.grid.search.metric)) + "\n" for item in found.results)
    replace_file(sweep.directory / LINES, lines.encode())
    if found.best is not None:
        overrides = ["--job.dir=none", f"--job.name={sweep.file.stem}-best"]
        recipe = load_recipe(read_toml(sweep.recipe_of(found.best.point)), overrides, None, registry)
        head = f"# The best point of {sweep.file.name}: {found.best.point.name}\n"
        replace_file(sweep.directory / BEST, (head + recipe.as_toml()).encode())


def line_of(item: RankedPoint, metric: str) -> dict[str, Any]:
    """Returns a point as a JSON object."""
    outcome = item.outcome
    return {
        "rank": item.rank,
        "point": item.point.name,
        "values": dict(item.point.values),
        "status": outcome.status,
        metric: outcome.value,
        "step": outcome.step,
        "tokens": outcome.tokens,
        "seconds": outcome.seconds,
        **{f"planned_{name}" if name == "tokens" else name: value for name, value in asdict(item.size).items()},
    }


def _settings(finished: Sequence[RankedPoint]) -> list[SeedGroup]:
    groups: dict[str, list[RankedPoint]] = {}
    for item in finished:
        groups.setdefault(item.point.setting, []).append(item)
    found = []
    for name, items in groups.items():
        values = [item.outcome.value for item in items if item.outcome.value is not None]
        shared = {key: value for key, value in items[0].point.values.items() if key != SEED or len(items) == 1}
        found.append(SeedGroup(name, shared, len(values), fmean(values), stdev(values) if len(values) > 1 else None))
    return found


def _effects(items: Sequence[RankedPoint], sign: int) -> list[Effect]:
    """Returns means per value of a key over all other keys; in a full grid this is the effect of the key alone."""
    found = []
    for key in items[0].point.values if items else ():
        pairs = [(item.point.values[key], item.outcome.value) for item in items if item.outcome.value is not None]
        for text, values in _groups(pairs):
            found.append(Effect(key, text, len(values), fmean(values), sign * min(sign * value for value in values)))
    return found


def _groups(pairs: Sequence[tuple[Any, float]]) -> list[tuple[str, list[float]]]:
    """Groups results by value; more than `2 * _BINS` distinct numbers are grouped into bins of equal size."""
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value, _ in pairs)
    distinct = {value_text(value) for value, _ in pairs}
    if numbers and len(distinct) > 2 * _BINS:
        ordered = sorted(pairs, key=lambda pair: pair[0])
        size = math.ceil(len(ordered) / _BINS)
        parts = [ordered[start : start + size] for start in range(0, len(ordered), size)]
        return [(f"{value_text(part[0][0])} to {value_text(part[-1][0])}", [result for _, result in part]) for part in parts]
    if numbers:
        pairs = sorted(pairs, key=lambda pair: pair[0])
    groups: dict[str, list[float]] = {}
    for value, result in pairs:
        groups.setdefault(value_text(value), []).append(result)
    return list(groups.items())


PAGE = "index.html"
_SHOWN = 6
"""Maximum number of keys whose results are plotted."""


def write_page(sweep: Sweep, found: Results, law: Sequence[str] = ()) -> Path:
    """Writes the self-contained page of the results; returns its path. `law` has the HTML of a scaling law, if one was fitted."""
    search, points = sweep.grid.search, sweep.points
    done = sum(item.outcome.ended for item in found.results)
    head = f"{search.kind}, {done} of {len(points)} points done, {search.metric} ({search.mode})"
    best = found.best
    parts = [
        f"<h1>{escape(sweep.file.stem)}</h1>",
        f'<p class="dim">{escape(head)}</p>',
        f"<p>Best: <strong>{escape(best.point.name)}</strong>, in <code>{BEST}</code>.</p>" if best else "",
        "<h2>Points</h2>",
        _points_table(sweep, found.results),
        _settings_table(found),
        _effects_table(sweep, found),
        *law,
        f'<p class="dim">The same as JSON lines: {LINES}</p>',
    ]
    target = sweep.directory / PAGE
    replace_file(target, document(sweep.file.stem, parts).encode())
    return target


def results_table(results: Sequence[RankedPoint], metric: str) -> tuple[list[str], list[list[Any]]]:
    """Returns the columns and rows of the points, for the terminal and the page."""
    keys = list(dict.fromkeys(key for item in results for key in item.point.values))
    head = ["rank", "point", *keys, metric, "status", "step", "parameters", "tokens", "FLOPs", "time"]
    body = []
    for item in results:
        outcome, size = item.outcome, item.size
        values = [value_text(item.point.values[key]) if key in item.point.values else "" for key in keys]
        result = f"{outcome.value:.6g}" if outcome.value is not None else ""
        sizes = [number(size.parameters), number(size.tokens), number(size.flops)]
        took = duration(outcome.seconds) if outcome.starts else ""
        body.append([item.rank or "", item.point.name, *values, result, outcome.status, outcome.step, *sizes, took])
    return head, body


def _points_table(sweep: Sweep, results: Sequence[RankedPoint]) -> str:
    head, body = results_table(results, sweep.grid.search.metric)
    made = rows(head, body, numbers={0, *range(2, len(head))})
    for item in results:  # plain replacement works because a name needs no HTML escaping and fills its cell
        if (sweep.folder(item.point) / REPORT).is_file():
            name = item.point.name
            made = made.replace(f"<td>{name}</td>", f'<td><a href="points/{name}/{REPORT}">{name}</a></td>', 1)
    said = [
        f"<details><summary>{escape(item.point.name)}: {item.outcome.status}, exit code {item.outcome.code}</summary>"
        f"<pre>{escape(chr(10).join(item.outcome.said))}</pre></details>"
        for item in results
        if item.outcome.said
    ]
    return made + "".join(said)


def _settings_table(found: Results) -> str:
    if all(setting.runs == 1 for setting in found.settings):
        return ""
    body = [
        [setting.name, setting.runs, f"{setting.mean:.6g}", f"{setting.deviation:.2g}" if setting.deviation is not None else ""]
        for setting in found.settings
    ]
    return "<h2>Settings over seeds</h2>" + rows(["setting", "runs", "mean", "standard deviation"], body, numbers=range(1, 4))


def _effects_table(sweep: Sweep, found: Results) -> str:
    """Returns the HTML of a table and plots of the effect of each key."""
    if not found.effects:
        return ""
    body = [[one.key, one.value, one.runs, f"{one.mean:.6g}", f"{one.best:.6g}"] for one in found.effects]
    ranked = [item for item in found.results if item.rank is not None]
    drawn = []
    for key in list(dict.fromkeys(one.key for one in found.effects))[:_SHOWN]:
        pairs = [(item.point.values[key], item.outcome.value) for item in ranked]
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value, _ in pairs):
            positive = all(value > 0 for value, _ in pairs)
            series = [FigureSeries("", [(float(value), result) for value, result in pairs if result is not None])]
            drawn.append(plot(key, series, x=key, y=sweep.grid.search.metric, log_x=positive, log_y=False))
    note = '<p class="dim">Means over all other keys: in a full grid, the effect of one key alone.</p>'
    pictures = f'<div class="charts">{"".join(drawn)}</div>' if drawn else ""
    return "<h2>Keys</h2>" + note + rows(["key", "value", "runs", "mean", "best"], body, numbers=range(2, 5)) + pictures
