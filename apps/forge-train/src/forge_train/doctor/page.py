"""The report of the doctor as one HTML file that fetches nothing, made from its JSON alone."""

from collections.abc import Mapping
from html import escape
from typing import Any

from forge_train.doctor.step import Check, checks_of
from forge_train.report.document import document
from forge_train.report.tables import fields, rows

_NAME = "forge-train doctor"


def page(report: Mapping[str, Any]) -> str:
    """The page of `doctor.json`, as far as it has got."""
    summary = [[step["name"], step["what"], step["verdict"], f"{step['seconds']:.1f} s"] for step in report["steps"]]
    return document(
        _NAME,
        [
            f"<h1>{_NAME}</h1>",
            f'<p class="dim">{escape(headline(report))}</p>',
            _regressions(report.get("regressions", [])),
            "<h2>Verdicts</h2>\n" + rows(["step", "what it looks at", "verdict", "time"], summary, numbers=(3,)),
            *(_step(step) for step in report["steps"]),
            "<h2>Machine and versions</h2>",
            f'<div class="tables">{fields("Machine", report["machine"])}{fields("Versions", report["versions"])}</div>',
        ],
    )


def headline(report: Mapping[str, Any]) -> str:
    """One line: the recipe, how many steps have which verdict, and whether the report is whole."""
    verdicts = [step["verdict"] for step in report["steps"]]
    counted = ", ".join(f"{verdicts.count(one)} {one}" for one in ("FAIL", "SLOW", "PASS", "SKIPPED") if one in verdicts)
    ended = "" if report["ended"] else "; broken off, later steps are missing"
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
