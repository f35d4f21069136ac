"""What differs between runs: keys of recipes, versions, machines. No component is asked: a run may be of another version."""

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from forge_core.config.toml import value_text
from forge_train.report.html import fields, rows
from forge_train.report.record import RunRecord

ALWAYS_DIFFER = ("job.name", "job.dir")
ABSENT = "-"
SHOWN = 12
"""Rows of differences that are not folded."""

_ITEM = re.compile(r"([\w.-]+?)\.(\d+)\.(.+)")
_ITEM_NAME = re.compile(r"([\w.-]+?)\.(\d+)\.name")
_PARTS = (("Model", "model"), ("Machine", "machine"), ("Versions", "versions"))


def differences(runs: Sequence[RunRecord]) -> str:
    """A row for every key, fact of the machine and version that is not the same in all runs that say something of it. What all
    have comes first; of many rows, the later ones are folded."""
    if len(runs) < 2:
        return ""
    parts = [("", [by_name(run.config) for run in runs], value_text)]
    parts += [(f"{caption.lower()}: ", [run.summary.get(key, {}) for run in runs], str) for caption, key in _PARTS[1:]]
    table = [
        [prefix + name, *cells]
        for prefix, tables, text in parts
        for name, cells in _all(tables, text)
        if name not in ALWAYS_DIFFER and len({cell for cell, told in zip(cells, tables, strict=True) if told}) > 1
    ]
    table.sort(key=lambda line: ABSENT in line)
    head = ["key", *(run.label for run in runs)]
    said = rows(head, table[:SHOWN], code=range(len(head))) if table else '<p class="dim">Nothing but the name.</p>'
    if more := table[SHOWN:]:
        said += f"<details><summary>{len(more)} more</summary>{rows(head, more, code=range(len(head)))}</details>"
    silent = ", ".join(run.label for run in runs if not run.config)
    return said + (f'<p class="dim">Without a recipe, and so not compared by its keys: {escape(silent)}.</p>' if silent else "")


def by_name(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same keys, where tables of an array that have different names are called by them: `hooks.save.every` in place of
    `hooks.2.every`, and `hooks` for their order. So a hook more or less does not make all later ones differ."""
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


def environment(runs: Sequence[RunRecord]) -> str:
    """Model, machine and versions of every run; of several, a column for each."""
    if len(runs) == 1:
        summary = runs[0].summary
        return _grid(fields(caption, summary[key]) for caption, key in _PARTS if summary.get(key))
    return _grid(
        rows([caption, *(run.label for run in runs)], [[name, *cells] for name, cells in _all(found, _plain)])
        for caption, key in _PARTS
        if any(found := [run.summary.get(key, {}) for run in runs])
    )


def _all(tables: Sequence[Mapping[str, Any]], text: Any) -> list[tuple[str, list[str]]]:
    """Every name of any table, and its value in each."""
    names = dict.fromkeys(name for table in tables for name in table)
    return [(name, [text(table[name]) if name in table else ABSENT for table in tables]) for name in names]


def _grid(parts: Any) -> str:
    inner = "".join(parts)
    return f'<div class="tables">{inner}</div>' if inner else ""


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
