"""`index.html` of a sweep: its points in order of merit, what each key did, and the scaling law once one is fitted."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from forge_core.config.toml import value_text
from forge_core.durable_files import replace_file
from forge_core.terminal import duration
from forge_train.report.html import rows
from forge_train.report.page import REPORT, document
from forge_train.sweep.grid import Sweep
from forge_train.sweep.plot import Series, number, plot
from forge_train.sweep.results import BEST, LINES, Result, Results

PAGE = "index.html"
_SHOWN = 6
"""Keys whose results are plotted."""


def write_page(sweep: Sweep, found: Results, law: Sequence[str] = ()) -> Path:
    """Writes the page, one file that fetches nothing, with the parts of a scaling law where there is one; returns its path."""
    search, points = sweep.grid.search, sweep.points
    done = sum(item.outcome.ended for item in found.results)
    head = f"{search.kind}, {done} of {len(points)} points done, {search.metric} ({search.mode})"
    best = found.best
    parts = [
        f"<h1>{escape(sweep.file.stem)}</h1>",
        f'<p class="dim">{escape(head)}</p>',
        f"<p>Best: <strong>{escape(best.point.name)}</strong>, in <code>{BEST}</code>.</p>" if best else "",
        "<h2>Points</h2>",
        _points(sweep, found.results),
        _settings_table(found),
        _effects_table(sweep, found),
        *law,
        f'<p class="dim">The same as JSON lines: {LINES}</p>',
    ]
    target = sweep.directory / PAGE
    replace_file(target, document(sweep.file.stem, parts).encode())
    return target


def table(results: Sequence[Result], metric: str) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of the points, for a terminal and for the page."""
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


def _points(sweep: Sweep, results: Sequence[Result]) -> str:
    head, body = table(results, sweep.grid.search.metric)
    made = rows(head, body, numbers={0, *range(2, len(head))})
    for item in results:  # names have no character that HTML changes, and fill their cells
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
    """Tables and pictures of what each key did."""
    if not found.effects:
        return ""
    body = [[one.key, one.value, one.runs, f"{one.mean:.6g}", f"{one.best:.6g}"] for one in found.effects]
    ranked = [item for item in found.results if item.rank is not None]
    drawn = []
    for key in list(dict.fromkeys(one.key for one in found.effects))[:_SHOWN]:
        pairs = [(item.point.values[key], item.outcome.value) for item in ranked]
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value, _ in pairs):
            positive = all(value > 0 for value, _ in pairs)
            series = [Series("", [(float(value), result) for value, result in pairs if result is not None])]
            drawn.append(plot(key, series, x=key, y=sweep.grid.search.metric, log_x=positive, log_y=False))
    note = '<p class="dim">Means over all that varies besides: in a whole grid, the effect of one key alone.</p>'
    pictures = f'<div class="charts">{"".join(drawn)}</div>' if drawn else ""
    return "<h2>Keys</h2>" + note + rows(["key", "value", "runs", "mean", "best"], body, numbers=range(2, 5)) + pictures
