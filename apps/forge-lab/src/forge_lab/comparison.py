"""Writes pages that compare runs: their curves in shared plots, and the differences of their recipes, machines and versions.

It only reads files and imports no component, because a run may be from another version.
"""

import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from forge_core.config.toml import value_text
from forge_train.report.html import rows
from forge_train.report.page import report
from forge_train.report.record import RunRecord
from forge_train.report.results import ABSENT, values_by_name

ALWAYS_DIFFER = ("job.name", "job.dir")
SHOWN = 12
"""Maximum number of rows of differences that are not folded."""

_ITEM = re.compile(r"([\w.-]+?)\.(\d+)\.(.+)")
_ITEM_NAME = re.compile(r"([\w.-]+?)\.(\d+)\.name")


def write_comparison(places: Sequence[Path], out: Path | None = None) -> Path:
    """Writes one page about several runs; returns its path.

    Args:
        places: directories of runs, or folders of runs.
        out: path of the page; by default `report.html` in the only place, or in the working directory.

    Raises:
        DataError: a place has no run, the files of a run cannot be read, or the page cannot be written.
    """
    return report(places, out, lambda runs: {"What differs": differences(runs)})


def differences(runs: Sequence[RunRecord]) -> str:
    """Returns an HTML table of the keys, machine facts and versions that differ between the runs that have them. Rows that all
    runs have come first; rows after `SHOWN` are folded."""
    if len(runs) < 2:
        return ""
    parts = [("", [by_name(run.config) for run in runs], value_text)]
    parts += [(f"{part}: ", [run.summary.get(part, {}) for run in runs], str) for part in ("machine", "versions")]
    table = [
        [prefix + name, *cells]
        for prefix, tables, text in parts
        for name, cells in values_by_name(tables, text)
        if name not in ALWAYS_DIFFER and len({cell for cell, told in zip(cells, tables, strict=True) if told}) > 1
    ]
    table.sort(key=lambda line: ABSENT in line)
    head = ["key", *(run.label for run in runs)]
    said = rows(head, table[:SHOWN], code=range(len(head))) if table else '<p class="dim">Only the names differ.</p>'
    if more := table[SHOWN:]:
        said += f"<details><summary>{len(more)} more</summary>{rows(head, more, code=range(len(head)))}</details>"
    silent = ", ".join(run.label for run in runs if not run.config)
    return said + (f'<p class="dim">Without a recipe, so their keys are not compared: {escape(silent)}.</p>' if silent else "")


def by_name(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys with tables of an array identified by name if the names are distinct: `hooks.save.every` instead of
    `hooks.2.every`, and `hooks` for their order. One more hook then does not change the keys of all later ones."""
    named: dict[str, dict[str, str]] = {}
    for key, value in config.items():
        if match := _ITEM_NAME.fullmatch(key):
            named.setdefault(match[1], {})[match[2]] = str(value)
    unique = {array: names for array, names in named.items() if len(set(names.values())) == len(names)}
    found: dict[str, Any] = {}
    for key, value in config.items():
        match = _ITEM.match(key)
        if match is None or match[1] not in unique:
            found[key] = value
        elif match[3] == "name":
            found[match[1]] = list(unique[match[1]].values())
        else:
            found[f"{match[1]}.{unique[match[1]].get(match[2], match[2])}.{match[3]}"] = value
    return found
