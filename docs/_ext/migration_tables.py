"""Tables of keys on the pages in docs/migration, from the tables by which `forge-train migrate` translates.

`python docs/_ext/migration_tables.py` writes the tables between the marks of each page; a test compares them.
"""

from itertools import groupby
from pathlib import Path

from forge_train.migration.engine import Framework, Key, shown
from forge_train.migration.formats import FRAMEWORKS

PAGES = Path(__file__).parents[1] / "migration"
BEGIN, END = "<!-- keys -->\n", "<!-- end of keys -->\n"


def table(framework: Framework) -> str:
    """Returns the keys of a framework beside those of Forge, and those without counterpart with the reason, as Markdown."""
    with_counterpart = [key for key in framework.keys if key.to]
    lines = [f"| {framework.title} | Forge | remark |", "|---|---|---|"]
    lines += [f"| `{key.name}` | {code(key.to.split(', '))} | {remark(key)} |" for key in with_counterpart]
    lines += ["", "Keys without counterpart:", "", f"| {framework.title} | why, or what to do instead |", "|---|---|"]
    rest = [key for key in framework.keys if not key.to]
    for note, keys in groupby(rest, key=lambda key: key.note):
        lines.append(f"| {code([key.name for key in keys])} | {escaped(note)} |")
    return "\n".join(lines) + "\n"


def code(names: list[str]) -> str:
    """Returns names as code."""
    return ", ".join(f"`{name}`" for name in names)


def remark(key: Key) -> str:
    """Returns the note of a key, and values that have another name in Forge."""
    values = [f"{shown(old)} is {shown(new)}" for old, new in (key.values or {}).items() if old != new]
    return escaped("; ".join([*([key.note] if key.note else []), *values]))


def escaped(text: str) -> str:
    """Returns text for a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;").replace("[[", "\\[\\[").replace("_", "\\_")


def page(framework: Framework) -> str:
    """Returns the page of a framework with its table."""
    text = (PAGES / f"{framework.name}.md").read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{table(framework)}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    for item in FRAMEWORKS.values():
        (PAGES / f"{item.name}.md").write_text(page(item), encoding="utf-8")
