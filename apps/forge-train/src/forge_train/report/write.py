"""Writes `report.html`: one file, pictures inline, nothing fetched when it is opened.

`summary` is plain data; every key is optional:

    name                text
    status              text, such as "finished" or "stopped: time limit"
    started, seconds    ISO time of the start; wall time in seconds
    config              the resolved recipe: text, or a list of {"key", "value", "origin"}
    machine, versions   mappings to text (`forge_train.report.machine`)
    model               mapping to numbers or text, such as {"parameters": 7_300_000}
    unigram_entropy     nats per token of the training corpus
    bytes_per_token     evaluation set -> mean bytes of text per token; gives bits per byte
    samples             list of {"prompt", "text"} and anything else, such as "temperature"
    routing             {"step", "layers": mapping of a layer to its experts' loads in units of their mean}
    checkpoints         list of {"step", "path", "bytes"}
    warnings            list of text

Curves and final numbers come from `metrics.jsonl` in the same directory.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_core.durable import replace_file
from forge_core.errors import DataError
from forge_core.redact import redacted, redacted_text
from forge_train.report.page import page
from forge_train.trackers.jsonl import METRICS, read

SUMMARY, REPORT = "report.json", "report.html"


def write_report(directory: Path, summary: Mapping[str, Any]) -> Path:
    """Writes `report.html` and, for `rewrite_report`, `report.json` into the run's directory; returns the page's path.

    Secrets (text under keys with token, key, secret, password; credentials in addresses) appear in neither.
    """
    clean = {name: redacted(value, name) for name, value in summary.items() if name != "config"}
    if "config" in summary:
        clean["config"] = _redacted_config(summary["config"])
    replace_file(directory / SUMMARY, json.dumps(clean, indent=1, default=str).encode())
    return _write_page(directory, clean)


def rewrite_report(directory: Path) -> Path:
    """The page of a run again, from what the run left in `directory`, finished or not.

    Raises:
        DataError: the directory holds no run.
    """
    summary, metrics = directory / SUMMARY, directory / METRICS
    if not summary.is_file() and not metrics.is_file():
        raise DataError(f"{directory} has neither {METRICS} nor {SUMMARY}: give a run's directory, such as runs/demo")
    if not summary.is_file():
        return _write_page(directory, {"name": directory.resolve().name, "status": "no summary yet: the run has not ended"})
    try:
        found = json.loads(summary.read_text(encoding="utf-8"))
    except ValueError as cause:
        raise DataError(f"{summary} is not JSON ({cause}); remove it to write the report from {METRICS} alone") from cause
    return _write_page(directory, found)


def _write_page(directory: Path, summary: Mapping[str, Any]) -> Path:
    target = directory / REPORT
    replace_file(target, page(summary, read(directory / METRICS)).encode())
    return target


def _redacted_config(config: Any) -> Any:
    if isinstance(config, str):
        return redacted_text(config)
    return [_redacted_row(row) for row in config]


def _redacted_row(row: Mapping[str, Any]) -> dict[str, Any]:
    key = str(row.get("key", ""))
    return {"key": key, "value": redacted(row.get("value"), key), "origin": redacted_text(str(row.get("origin", "")))}
