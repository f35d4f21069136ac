"""The report of the doctor: `doctor.json`, `doctor.html`, and a comparison with an earlier report. No torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from forge_core.errors import DataError
from forge_core.files import replace_file
from forge_train.doctor.step import Check, StepOutcome, checks_of
from forge_train.report.html import document, fields, rows
from forge_train.report.page import machine, versions

DOCUMENT, PAGE = "doctor.json", "doctor.html"
SCHEMA = 1


class Report:
    """Collects results, and writes them to `folder` if one is set. It contains neither the machine's name nor its addresses."""

    def __init__(self, recipe: str, folder: Path | None) -> None:
        self.folder = folder
        self.document: dict[str, Any] = {
            "schema": SCHEMA,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "recipe": recipe,
            "ended": False,
            "machine": machine(),
            "versions": versions(),
            "steps": [],
        }
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._save()

    def write(self, results: Sequence[StepOutcome]) -> None:
        """Saves all results so far."""
        self.document["steps"] = [result.as_json() for result in results]
        self._save()

    def end(self, old: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Compares with an earlier report, if given, and writes the page; returns the document."""
        self.document["ended"] = True
        if old is not None:
            self.document["regressions"] = [str(one) for one in regressions(old, self.document)]
        self._save()
        if self.folder is not None:
            replace_file(self.folder / PAGE, report_page(self.document).encode())
        return self.document

    def _save(self) -> None:
        if self.folder is not None:
            replace_file(self.folder / DOCUMENT, json.dumps(self.document, indent=1, ensure_ascii=False).encode())


_NAME = "forge-train doctor"


def report_page(report: Mapping[str, Any]) -> str:
    """Returns the page of `doctor.json`, which may be incomplete."""
    summary = [[step["name"], step["what"], step["verdict"], f"{step['seconds']:.1f} s"] for step in report["steps"]]
    return document(
        _NAME,
        [
            f"<h1>{_NAME}</h1>",
            f'<p class="dim">{escape(headline(report))}</p>',
            _regressions(report.get("regressions", [])),
            "<h2>Verdicts</h2>\n" + rows(["step", "checks", "verdict", "time"], summary, numbers=(3,)),
            *(_step(step) for step in report["steps"]),
            "<h2>Machine and versions</h2>",
            f'<div class="tables">{fields("Machine", report["machine"])}{fields("Versions", report["versions"])}</div>',
        ],
    )


def headline(report: Mapping[str, Any]) -> str:
    """Returns a line with the recipe, the number of steps per verdict, and whether the report is complete."""
    verdicts = [step["verdict"] for step in report["steps"]]
    counted = ", ".join(f"{verdicts.count(one)} {one}" for one in ("FAIL", "SLOW", "PASS", "SKIPPED") if one in verdicts)
    ended = "" if report["ended"] else "; interrupted, later steps are missing"
    return f"{report['started']}, recipe {report['recipe']}: {counted}{ended}"


def _step(step: Mapping[str, Any]) -> str:
    table = [[check.name, check.verdict, check.value(), check.expected, check.remedy] for check in _checks(step)]
    log = f"<details><summary>The end of its output</summary><pre>{escape(step['log'])}</pre></details>" if step["log"] else ""
    title = f"<h2>{escape(step['name'])}: {step['verdict']}</h2>\n"
    return title + rows(["check", "verdict", "measured", "expected", "what to do"], table) + log


def _checks(step: Mapping[str, Any]) -> tuple[Check, ...]:
    return checks_of(step["checks"])


def _regressions(lines: list[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<div class="warnings"><strong>Worse than before</strong><ul>{items}</ul></div>' if items else ""


TOLERANCE = 0.03
"""Share by which a number may be worse than before without being reported."""


@dataclass(frozen=True)
class Regression:
    """A number that became worse by `share` (0.1 is 10 %), or a verdict that became worse (then `share` is None)."""

    step: str
    check: str
    before: float | str
    now: float | str
    unit: str
    share: float | None

    def __str__(self) -> str:
        if self.share is None:
            return f"{self.step}: {self.check}: {self.before}, now {self.now}"
        numbers = f"{self.before:.4g}, now {self.now:.4g} {self.unit}".rstrip()
        return f"{self.step}: {self.check}: {numbers} ({self.share:.1%} worse)"


def read_report(path: Path) -> dict[str, Any]:
    """Reads a report.

    Raises:
        DataError: the file is not a report.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        _verdicts(document)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as cause:
        raise DataError(f"{path} is not a report of forge-train doctor ({cause}); give a doctor.json") from cause
    return document


def regressions(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Regression]:
    """Returns checks that are worse in the new report; checks in only one of the reports are not compared."""
    before, found = _verdicts(old), []
    for (step, name), now in _verdicts(new).items():
        was = before.get((step, name))
        if was is None:
            continue
        share = _worse(was, now)
        if share is not None and share > TOLERANCE:
            found.append(Regression(step, name, was["measured"], now["measured"], now["unit"], share))
        elif (was["verdict"], now["verdict"]) in (("PASS", "SLOW"), ("PASS", "FAIL"), ("SLOW", "FAIL")):
            found.append(Regression(step, name, was["verdict"], now["verdict"], "", None))
    return found


def _verdicts(document: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(step["name"], check["name"]): check for step in document["steps"] for check in step["checks"]}


def _worse(was: Mapping[str, Any], now: Mapping[str, Any]) -> float | None:
    """Returns the share by which `now` is worse, negative if it is better; None unless both are numbers of the same unit."""
    pair = was["measured"], now["measured"]
    if not now["better"] or was["unit"] != now["unit"] or any(isinstance(value, str) or value <= 0 for value in pair):
        return None
    ratio = pair[1] / pair[0]
    return 1 - ratio if now["better"] == "higher" else ratio - 1
