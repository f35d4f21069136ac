"""Writes `report.html`: one file, everything inline, nothing fetched when it is opened.

`summary` is plain data; every key is optional:

    name                text
    status              text, such as "finished" or "stopped: time limit"
    ended               ISO time of the end; lines of the metrics that are newer belong to a later start
    config              the resolved recipe: text, or a list of {"key", "value", "origin"}
    machine, versions   mappings to text (`forge_train.report.machine`)
    model               mapping to numbers or text, such as {"parameters": 7_300_000}
    unigram_entropy     nats per token of the training corpus
    bytes_per_token     evaluation set -> mean bytes of text that a predicted token says; gives bits per byte
    samples             list of {"prompt", "text"} and anything else, such as "temperature"
    answers             list of {"step", "set", "prompt", "answer", "said", "right", "pictures": PNG files in base64}
    routing             {"step", "layers": mapping of a layer to its experts' loads in units of their mean}
    similarity          {"step", "maps": list of {"title", "rows", "columns", "values": a list for each row, null for none}}
    checkpoints         list of {"step", "path", "bytes"}
    warnings            list of text

Curves and final numbers come from `metrics.jsonl` in the same directory, faults from its logs.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from forge_core.durable_files import replace_file
from forge_core.errors import DataError
from forge_core.redaction import redacted, redacted_text
from forge_train.directory import previous
from forge_train.report.found import SUMMARY, Found, find, is_run
from forge_train.report.page import page

REPORT = "report.html"


def write_report(directory: Path, summary: Mapping[str, Any]) -> Path:
    """Writes `report.html` and, for later reports, `report.json` into the run's directory; returns the page's path.

    Secrets (text under keys with token, key, secret, password; credentials in addresses) appear in neither.
    """
    clean = {name: redacted(value, name) for name, value in summary.items() if name != "config"}
    if "config" in summary:
        clean["config"] = _redacted_config(summary["config"])
    replace_file(directory / SUMMARY, json.dumps(clean, indent=1, default=str).encode())
    return _write(directory / REPORT, [find(directory)])


def report(places: Sequence[Path], out: Path | None = None) -> Path:
    """The page of one or several runs, from what they left in their directories, finished or not; returns its path.

    Args:
        places: directories of runs, or folders of them. A run that is given twice counts once.
        out: where the page is written: by default `report.html` of the only place, or of the working directory.

    Raises:
        DataError: a place holds no run, what it left cannot be read, or the page cannot be written.
    """
    runs = {directory.resolve(): directory for place in places for directory in runs_in(place)}
    target = out or (places[0] if len(places) == 1 else Path()) / REPORT
    return _write(target, _named([find(directory) for directory in runs.values()]))


def runs_in(place: Path) -> list[Path]:
    """The run's directory itself, or the runs in a folder of runs, by name.

    Raises:
        DataError: there is none.
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


def _named(runs: Sequence[Found]) -> list[Found]:
    """With labels that tell the runs apart: names, or as much of the paths as is needed."""
    for parts in range(max((len(run.directory.resolve().parts) for run in runs), default=0)):
        labels = [run.label if parts == 0 else "/".join(run.directory.resolve().parts[-parts:]) for run in runs]
        if len(set(labels)) == len(runs):
            return [replace(run, label=label) for run, label in zip(runs, labels, strict=True)]
    return list(runs)


def _write(target: Path, runs: Sequence[Found]) -> Path:
    try:
        replace_file(target, page(runs).encode("utf-8", "replace"))
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
