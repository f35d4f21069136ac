"""What differs between runs: keys of recipes, versions, machines. No component is asked: a run may be of another version."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from forge_core.config.write import value_text
from forge_train.report.found import Found
from forge_train.report.tables import fields, rows

ALWAYS_DIFFER = ("job.name", "job.dir")
_PARTS = (("Model", "model"), ("Machine", "machine"), ("Versions", "versions"))


def differences(runs: Sequence[Found]) -> str:
    """A row for every key, fact of the machine and version that is not the same in all runs that say something of it."""
    if len(runs) < 2:
        return ""
    parts = [("", [run.config for run in runs], value_text)]
    parts += [(f"{caption.lower()}: ", [run.summary.get(key, {}) for run in runs], str) for caption, key in _PARTS[1:]]
    table = [
        [prefix + name, *cells]
        for prefix, tables, text in parts
        for name, cells in _all(tables, text)
        if name not in ALWAYS_DIFFER and len({cell for cell, told in zip(cells, tables, strict=True) if told}) > 1
    ]
    head = ["key", *(run.label for run in runs)]
    said = rows(head, table, code=range(len(head))) if table else '<p class="dim">Nothing but the name.</p>'
    silent = ", ".join(run.label for run in runs if not run.config)
    return said + (f'<p class="dim">Without a recipe, and so not compared by its keys: {escape(silent)}.</p>' if silent else "")


def environment(runs: Sequence[Found]) -> str:
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
    return [(name, [text(table[name]) if name in table else "-" for table in tables]) for name in names]


def _grid(parts: Any) -> str:
    inner = "".join(parts)
    return f'<div class="tables">{inner}</div>' if inner else ""


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
