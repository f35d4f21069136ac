"""The report of one or several runs as one HTML file: everything is inline, and nothing is fetched when it is opened.

`summary` is plain data; every key is optional:

    name                text
    status              text, such as "finished" or "stopped: time limit"
    ended               ISO time of the end; lines of the metrics that are newer belong to a later start
    config              the resolved recipe: text, or a list of {"key", "value", "origin"}
    machine, versions   mappings to text, see the functions of these names
    model               mapping to numbers or text, such as {"parameters": 7_300_000}
    unigram_entropy     nats per token of the training corpus
    bytes_per_token     evaluation set -> mean bytes of text per predicted token; gives bits per byte
    metrics             names of the objective's own metrics, such as "accuracy"; its loss then has no perplexity
    samples             list of {"prompt", "text"} and anything else, such as "temperature"
    answers             list of {"step", "set", "prompt", "answer", "said", "right", "pictures": PNG files in base64}
    routing             {"step", "layers": mapping of a layer to its experts' loads divided by their mean}
    similarity          {"step", "maps": list of {"title", "rows", "columns", "values": a list for each row, null for none}}
    checkpoints         list of {"step", "path", "bytes"}
    warnings            list of text

Curves and final numbers come from `metrics.jsonl` in the same directory, faults from its logs. A report
contains neither the machine's name and addresses nor environment variables.
"""

import json
import os
import platform
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from forge_core.errors import DataError
from forge_core.files import replace_file
from forge_core.machine import processor_name, usable_cores
from forge_core.redaction import redacted, redacted_text
from forge_core.terminal import size
from forge_train.directory import previous
from forge_train.hooks.evaluation import evaluated
from forge_train.report.charts import MOST_OTHER, OTHER, Chart, charts, drawn
from forge_train.report.curves import limit
from forge_train.report.html import document, embedded, heat, rows, section, static, swatch, table
from forge_train.report.record import MOST_FAULTS, SUMMARY, RunRecord, is_run, read_record
from forge_train.report.results import environment, mixture, overview, results

if TYPE_CHECKING:
    from forge_train.recipe.load import Recipe
    from forge_train.run.run import Run


REPORT = "report.html"

Sections = Callable[[Sequence[RunRecord]], Mapping[str, str]]
"""Function that returns further sections of a page about some runs: HTML by title; empty sections are left out."""
NO_SECTIONS: Mapping[str, str] = MappingProxyType({})


def write_report(directory: Path, summary: Mapping[str, Any]) -> Path:
    """Writes `report.html` and, for later reports, `report.json` to the run's directory; returns the page's path.

    Secrets (values of keys with token, key, secret or password; credentials in URLs) are removed from both.
    """
    clean = {name: redacted(value, name) for name, value in summary.items() if name != "config"}
    if "config" in summary:
        clean["config"] = _redacted_config(summary["config"])
    replace_file(directory / SUMMARY, json.dumps(clean, indent=1, default=str).encode())
    return _write_page(directory / REPORT, [read_record(directory)])


def report(places: Sequence[Path], out: Path | None = None, sections: Sections | None = None) -> Path:
    """Writes the page of one or several runs, finished or not, from the files in their directories; returns its path.

    Args:
        places: directories of runs, or folders of runs. Duplicates count once.
        out: path of the page; by default `report.html` in the only place, or in the working directory for several.
        sections: returns further sections, which follow the results.

    Raises:
        DataError: a place has no run, files of a run cannot be read, or the page cannot be written.
    """
    runs = _with_labels([read_record(directory) for directory in directories_of(places)])
    target = out or (places[0] if len(places) == 1 else Path()) / REPORT
    return _write_page(target, runs, sections(runs) if sections else NO_SECTIONS)


def directories_of(places: Sequence[Path]) -> list[Path]:
    """Returns the directories of the runs in some places, without duplicates.

    Raises:
        DataError: a place has no run.
    """
    return list({directory.resolve(): directory for place in places for directory in runs_in(place)}.values())


def runs_in(place: Path) -> list[Path]:
    """Returns a run's directory itself, or the directories of the runs in a folder, sorted by name.

    Raises:
        DataError: there is no run.
    """
    if is_run(place):
        return [place]
    if not place.is_dir():
        raise DataError(f"{place} is not a directory: give a run's directory, such as runs/demo, or a folder of runs")
    kept_aside = set(previous(place))
    found = [path for path in sorted(place.iterdir()) if path not in kept_aside and path.is_dir() and is_run(path)]
    if not found:
        raise DataError(
            f"{place} holds no run: it has neither metrics.jsonl nor report.json; give a run's directory, such as "
            "runs/demo, or a folder of runs"
        )
    return found


def _with_labels(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Returns the runs with unique labels: their names, or as many parts of their paths as necessary."""
    for parts in range(max((len(run.directory.resolve().parts) for run in runs), default=0)):
        labels = [run.label if parts == 0 else "/".join(run.directory.resolve().parts[-parts:]) for run in runs]
        if len(set(labels)) == len(runs):
            return [replace(run, label=label) for run, label in zip(runs, labels, strict=True)]
    return list(runs)


def _write_page(target: Path, runs: Sequence[RunRecord], sections: Mapping[str, str] = NO_SECTIONS) -> Path:
    try:
        replace_file(target, page(runs, sections).encode("utf-8", "replace"))
    except OSError as cause:
        raise DataError(f"the report cannot be written to {target}: {cause.strerror}; choose another place with --out") from cause
    return target


def _redacted_config(config: Any) -> Any:
    if isinstance(config, str):
        return redacted_text(config)
    return [_redacted_row(row) for row in config]


def _redacted_row(row: Mapping[str, Any]) -> dict[str, Any]:
    key = str(row.get("key", ""))
    return {"key": key, "value": redacted(row.get("value"), key), "origin": redacted_text(str(row.get("origin", "")))}


_BASE64 = re.compile(r"[A-Za-z0-9+/]*={0,2}")
_LIBRARY = ("uplot/uPlot.min.css", "uplot/uPlot.iife.min.js", "uplot/LICENSE")


def page(runs: Sequence[RunRecord], sections: Mapping[str, str] = NO_SECTIONS) -> str:
    """Returns the whole page, with further `sections` after the results; parts without content are left out."""
    shown, more = _shown(charts(runs))
    title = runs[0].label if len(runs) == 1 else f"{len(runs)} runs"
    parts = [
        f"<header><h1>{escape(title)}</h1>",
        f'<p class="dim">{escape(_headline(runs))}</p></header>',
        _notes(runs),
        overview(runs),
        section("Results", results(runs)),
        *(section(heading, inner) for heading, inner in sections.items()),
        _board(runs, shown, more),
        section("Faults and restarts", _faults(runs)),
        section("Generated text", _of_each(runs, lambda run: "".join(map(_sample, run.summary.get("samples", ()))))),
        section("Answers to held-out documents", _of_each(runs, _answers)),
        section("Checkpoints", _of_each(runs, _checkpoints)),
        section("Model, machine and versions", environment(runs)),
        section("Recipe", _of_each(runs, _recipe)),
    ]
    if not shown:
        return document(title, parts)
    styles, library, license_ = (static(name) for name in _LIBRARY)
    parts += [_about(limit(sum(len(chart.curves) for chart in shown)), license_), embedded("data", drawn(runs, shown))]
    return document(title, parts, styles=[styles], scripts=[library, static("series.js"), static("report.js")])


def _headline(runs: Sequence[RunRecord]) -> str:
    if len(runs) > 1:
        return "on top of each other, each in its color"
    history = runs[0].history
    when = f"from {_minutes(history.first)} to {_minutes(history.last)} UTC" if history.first else ""
    empty = "no step has been logged yet" if history.step is None else ""
    return " · ".join(filter(None, [runs[0].status, when, empty]))


def _minutes(time: str) -> str:
    return time[:16].replace("T", " ")


def _notes(runs: Sequence[RunRecord]) -> str:
    """Returns the warnings of the runs, and notes about missing or unreadable files."""
    items = []
    for run in runs:
        empty = ["no step has been logged yet"] if run.history.step is None and len(runs) > 1 else []
        name = f"{run.label}: " if len(runs) > 1 else ""
        items += [f"<li>{escape(name + text)}</li>" for text in (*run.summary.get("warnings", ()), *run.notes, *empty)]
    return f'<div class="warnings"><strong>Warnings</strong><ul>{"".join(items)}</ul></div>' if items else ""


def _shown(made: list[Chart]) -> tuple[list[Chart], list[str]]:
    """Returns the charts to draw, and the titles of charts beyond the maximum number."""
    other = [chart for chart in made if chart.section == OTHER]
    left_out = other[MOST_OTHER:]
    return [chart for chart in made if chart not in left_out], [chart.title for chart in left_out]


def _board(runs: Sequence[RunRecord], shown: Sequence[Chart], more: Sequence[str]) -> str:
    """Returns the controls, and the frames into which the script draws charts."""
    sections: dict[str, list[str]] = {}
    for number, chart in enumerate(shown):
        name, unit = escape(chart.title), escape(chart.unit)
        frame = f'<figure data-chart="{number}"><figcaption><b>{name}</b> <span class="dim">{unit}</span></figcaption></figure>'
        sections.setdefault(chart.section, []).append(frame)
    below = {"Data": mixture(runs), "Experts": _of_each(runs, _experts), "Inside": _of_each(runs, _similarity)}
    inner = [
        section(name, f'<div class="charts">{"".join(frames)}</div>{below.pop(name, "")}') for name, frames in sections.items()
    ]
    inner += [section(name, rest) for name, rest in below.items()]
    if not shown:
        return "".join(inner)
    if more:
        inner.append(f'<p class="dim">Not drawn: {escape(", ".join(more))}.</p>')
    return f'<div class="board">{_controls(runs)}<noscript><p>The curves need JavaScript.</p></noscript>{"".join(inner)}</div>'


def _controls(runs: Sequence[RunRecord]) -> str:
    axes = "".join(
        f'<button data-axis="{axis}" aria-pressed="{str(axis == "step").lower()}">{name}</button>'
        for axis, name in (("step", "steps"), ("tokens", "tokens"), ("hours", "hours"))
    )
    names = "".join(
        f'<button class="run" data-run="{number}" aria-pressed="true">{swatch(number)}{escape(run.label)}</button>'
        for number, run in enumerate(runs)
    )
    return (
        f'<div class="controls"><span class="group">{axes}</span>'
        '<label>smooth <input id="smooth" type="range" min="0" max="8" value="0"><output id="width">off</output></label>'
        '<button id="log" aria-pressed="false">log y</button>'
        f"{f'<span>{names}</span>' if len(runs) > 1 else ''}"
        '<span class="zoom"><output id="range"></output><button id="all" hidden>show all</button></span></div>'
    )


def _experts(run: RunRecord) -> str:
    routing = run.summary.get("routing")
    if not routing:
        return ""
    note = f"step {routing.get('step', 'unknown')}; load of each expert, 0 white, 1 the mean, 2 and more full"
    drawing = heat("Load of experts", note, routing["layers"])
    return f'<div class="heat-map">{drawing}</div>' if drawing else ""


def _similarity(run: RunRecord) -> str:
    found = run.summary.get("similarity")
    if not found:
        return ""
    note = f"step {found.get('step', 'unknown')}; unbiased linear CKA, 0 white, 1 full"
    drawn = (table(one["title"], note, one["rows"], one["columns"], one["values"]) for one in found["maps"])
    return "".join(f'<div class="heat-map">{drawing}</div>' for drawing in drawn)


def _faults(runs: Sequence[RunRecord]) -> str:
    listed = [(fault, number) for number, run in enumerate(runs) for fault in run.faults]
    listed.sort(key=lambda pair: (pair[0].time, pair[0].step or 0))
    kept, several = listed[-MOST_FAULTS:], len(runs) > 1
    body: list[list[Any]] = []
    for fault, number in kept:
        line = [fault.time.replace("T", " "), "" if fault.step is None else fault.step, fault.kind, fault.text]
        body.append([runs[number].label, *line] if several else line)
    left = f'<p class="dim">{len(listed) - MOST_FAULTS} earlier ones are not listed.</p>' if len(listed) > MOST_FAULTS else ""
    head = ["time (UTC)", "step", "what", ""]
    made = rows(
        ["run", *head] if several else head, body, numbers=(1 + several,), runs=[number for _, number in kept] if several else ()
    )
    return left + made if body else ""


def _of_each(runs: Sequence[RunRecord], part: Any) -> str:
    """Returns a part of the page for every run, with the run's name if there are several."""
    made = [(number, run.label, part(run)) for number, run in enumerate(runs)]
    if len(runs) == 1:
        return made[0][2]
    return "".join(f"<h3>{swatch(number)}{escape(label)}</h3>{inner}" for number, label, inner in made if inner)


def _sample(item: Any) -> str:
    settings = ", ".join(f"{key} {value}" for key, value in item.items() if key not in ("prompt", "text"))
    text = f"<pre><b>{escape(str(item.get('prompt', '')))}</b>{escape(str(item.get('text', '')))}</pre>"
    return (f'<p class="dim">{escape(settings)}</p>' if settings else "") + text


def _answers(run: RunRecord) -> str:
    """Returns the model's answers with their images, and the answers of the documents if they differ."""
    cards = []
    for item in run.summary.get("answers", ()):
        names = [name for name in item.get("pictures", ()) if isinstance(name, str) and _BASE64.fullmatch(name)]
        pictures = "".join(f'<img alt="" src="data:image/png;base64,{name}">' for name in names)
        said, answer, prompt = (escape(str(item.get(key, "")).strip()) for key in ("said", "answer", "prompt"))
        mark = f"<b>{said}</b>" if item.get("right") else f"<s>{said or '&nbsp;'}</s><br><b>{answer}</b>"
        asked = f'<span class="dim">{prompt}</span><br>' if prompt else ""
        cards.append(f"<figure>{pictures}<figcaption>{asked}{mark}</figcaption></figure>")
    note = '<p class="dim">Bold is what the document says, struck out what was said instead; wrong answers come first.</p>'
    return f'{note}<div class="answers">{"".join(cards)}</div>' if cards else ""


def _checkpoints(run: RunRecord) -> str:
    items = run.summary.get("checkpoints", ())
    table = [[item.get("path", ""), item.get("step", ""), size(item["bytes"]) if "bytes" in item else ""] for item in items]
    return rows(["path", "step", "size"], table, numbers=(1, 2)) if table else ""


def _recipe(run: RunRecord) -> str:
    if not run.recipe:
        return ""
    inner = rows(["key", "value", "origin"], run.recipe, code=(0, 1, 2))
    return f"<details><summary>The resolved recipe, with the origin of every value</summary>{inner}</details>"


def _about(most: int, license_: str) -> str:
    text = (
        f"A curve of more than {most:,} points is drawn by the lowest and highest value in each of {most // 2:,} equal parts, "
        "so no extreme is lost; smoothing then begins from the means of the parts. It is a mean whose weights fall "
        "exponentially on both sides, to 1/e within the steps told next to it; what has no noise is not smoothed. Values that "
        "are not finite are gaps. Hours are those of training that counts: without steps that were lost at a restart, and "
        "without the time between two starts. Dotted vertical lines are restarts, red triangles other faults; both are listed "
        "below the curves."
    )
    return (
        f'<footer class="dim"><h2>About the curves</h2><p>{text}</p>'
        f"<details><summary>They are drawn by uPlot; its license</summary><pre>{escape(license_)}</pre></details></footer>"
    )


def write_run_report(run: "Run", recipe: "Recipe", reason: str, warnings: list[str]) -> Path:
    """Gathers the facts of a run and writes its report; rank 0 only."""
    return write_report(
        run.directory,
        {
            "name": run.job.job.name,
            "status": reason,
            "ended": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "config": recipe.origins(),
            "machine": machine() | _processes(run),
            "versions": versions() | commit(Path()),
            "model": {
                "parameters": run.training.parameters,
                "layout": str(run.topology.layout),
                "transforms": list(run.model.plan.names()),
            },
            "checkpoints": _stored_checkpoints(run.directory),
            "warnings": [*warnings, *run.health.summary()],
            **data_facts(run),
        },
    )


def data_facts(run: "Run") -> dict[str, Any]:
    """Returns the unigram entropy of the corpus, and the mean bytes of text per predicted token of each held-out set; or the
    metrics of an objective that does not predict each token."""
    if metrics := evaluated(run.job.objective):
        return {"metrics": list(metrics)}
    sets = {name: found.predicted() for name, found in run.evaluations.items()}
    known = {name: found for name, found in sets.items() if found is not None}
    return {
        "unigram_entropy": run.data.entropy(),
        "bytes_per_token": {name: size / tokens for name, (tokens, size) in known.items() if size > 0},
    }


def _processes(run: "Run") -> dict[str, str]:
    """Returns the device of rank 0, the number of processes, and the threads per process."""
    import torch

    from forge_parallel.accelerator import name

    return {
        "Device of rank 0": name(run.topology.device),
        "Processes": str(run.topology.size),
        "Threads per process": str(torch.get_num_threads()),
    }


def _stored_checkpoints(directory: Path) -> list[dict[str, Any]]:
    """Returns the committed checkpoints in the run's directory; a remote store is not listed."""
    return [
        {
            "path": folder.name,
            "step": int(folder.name.split("-")[1]),
            "bytes": sum(file.stat().st_size for file in folder.iterdir()),
        }
        for folder in sorted((directory / "checkpoints").glob("step-*"))
    ]


_PACKAGES = ("torch", "numpy", "tokenizers", "pydantic")
_OURS = (
    "forge-train",
    "forge-core",
    "forge-parallel",
    "forge-models",
    "forge-data",
    "forge-ckpt",
    "forge-vlm",
    "forge-interp",
    "forge-lab",
)


def machine() -> dict[str, str]:
    """Returns processor, cores, memory and operating system."""
    found = {
        "Processor": processor_name(),
        "CPU cores": str(usable_cores()),
        "System": f"{platform.system()} {platform.release()}",
    }
    if "SC_PHYS_PAGES" in os.sysconf_names:
        found["Memory"] = size(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return found


def versions() -> dict[str, str]:
    """Returns the versions of Python, of libraries that affect numbers, and of Forge."""
    found = {"Python": platform.python_version()}
    for name in (*_PACKAGES, *_OURS):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit(directory: Path) -> dict[str, str]:
    """Returns the git commit of a directory, with `-dirty` if files differ from it; empty outside a repository or without git."""
    command = ["git", "-C", str(directory), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return {"Commit of the working directory": told.stdout.strip()} if told.returncode == 0 else {}
