"""Tables of keys and of public names on pages, from the code, so that pages are as complete in the repository as on the site.

`python docs/_ext/reference_tables.py` writes them between marks, such as `<!-- made: components forge.norms -->` and
`<!-- end -->`; a test compares them. `components` with a group gives each of its components with its keys, `sections` each plain
section of a recipe with its keys, `presets` each preset with what the comment at its head states, `front` with a package the
names that it exports, `faults` and `promises` the tests of each.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any

from forge_faults import table_of_faults, table_of_promises, tests

from forge_core.component import fields_of
from forge_core.config.fields import describe_shape, shape_of, written
from forge_core.config.toml import value_text
from forge_core.registry import GROUPS, Entry, Registry
from forge_train.recipe.load import load_recipe
from forge_train.recipe.schema import Job

DOCS = Path(__file__).parents[1]
MARK = re.compile(r"<!-- made: (\w+) ?([\w.]*) -->\n.*?<!-- end -->\n", re.DOTALL)


def components(group: str) -> list[str]:
    """A definition and a table of keys for every component of a group."""
    assert group in GROUPS, f"there is no plugin group {group}"
    registry, lines = Registry(), list[str]()
    for entry in ours(registry, group):
        component = registry.load_entry(entry)
        doc = plain(inspect.getdoc(component) or "")
        lines += [f"**`{entry.name}`** ({entry.distribution}): {doc}", "", *table(keys(component)), ""]
    return lines


def sections(_: str) -> list[str]:
    """A table of keys for every section of a recipe that has keys of its own."""
    lines: list[str] = []
    for info in fields_of(Job):
        shape = shape_of(info.type)
        if shape.kind == "section":
            lines += [f"**`[{info.name}]`** {plain(info.doc)}", "", *table(keys(shape.type)), ""]
        else:
            lines += [f"**`{info.name}`** ({describe_shape(shape)}): {plain(info.doc)}", ""]
    return lines


def presets(_: str) -> list[str]:
    """Name, model, data and batch of every preset."""
    registry = Registry()
    lines = ["| preset | what | parameters | GPUs | tokens a step |", "|---|---|---|---|---|"]
    for entry in ours(registry, "forge.presets"):
        text = registry.load_entry(entry).read_text(encoding="utf-8")
        head = [line.removeprefix("# ") for line in takewhile(lambda line: line.startswith("# "), text.splitlines())]
        facts = dict(line.split(": ", 1) for line in head if re.match(r"(Parameters|Active|GPUs): ", line))
        sized = next((number for number, line in enumerate(head) if line.startswith("Parameters: ")), len(head))
        what = " ".join(head[:sized])
        job: Any = load_recipe(entry.name, registry=registry, here=None).job
        tokens = job.train.global_batch * job.data.sequence_length
        lines.append(
            f"| `{entry.name}` | {cell(what)} | {facts.get('Parameters', '')} | {facts.get('GPUs', 'any')} | {tokens:,} |"
        )
    return [*lines, ""]


def front(package: str) -> list[str]:
    """The names that a package exports, and the first sentence of each."""
    module = importlib.import_module(package)
    rows = [(name, _sentence(getattr(module, name))) for name in sorted(module.__all__)]
    return ["| name | |", "|---|---|", *(f"| `{name}` | {cell(text)} |" for name, text in rows), ""]


def _sentence(value: Any) -> str:
    """The first sentence of a docstring; of a value that is no class or function, its type."""
    if not (inspect.isclass(value) or callable(value) or inspect.ismodule(value)):
        return f"`{type(value).__name__}`"
    paragraph = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[\w)`]\.)\s+(?=[A-Z`])", paragraph)[0]


MAKERS: Mapping[str, Callable[[str], Iterable[str]]] = MappingProxyType(
    {
        "components": components,
        "sections": sections,
        "presets": presets,
        "front": front,
        "faults": lambda _: table_of_faults(tests()),
        "promises": lambda _: table_of_promises(tests()),
    }
)


@cache
def made(kind: str, argument: str) -> str:
    """What stands between two marks."""
    return "\n".join(MAKERS[kind](argument)).strip()


def page(file: Path) -> str:
    """Returns the text of a page with its tables of today."""

    def renewed(match: re.Match[str]) -> str:
        kind, argument = match[1], match[2]
        return f"<!-- made: {kind}{argument and ' ' + argument} -->\n\n{made(kind, argument)}\n\n<!-- end -->\n"

    return MARK.sub(renewed, file.read_text(encoding="utf-8"))


def pages() -> Iterator[Path]:
    """Pages that have tables."""
    for file in sorted(DOCS.rglob("*.md")):
        if "_build" not in file.parts and MARK.search(file.read_text(encoding="utf-8")):
            yield file


def ours(registry: Registry, group: str) -> Iterator[Entry]:
    """The components of Forge's own distributions."""
    places = {folder.name for parent in ("packages", "apps") for folder in (DOCS.parent / parent).iterdir()}
    yield from (entry for entry in registry.of(group) if entry.distribution in places)


@dataclass(frozen=True)
class Key:
    """A row of a table."""

    name: str
    takes: str
    default: str
    resume: str
    doc: str


def keys(cls: type, prefix: str = "") -> Iterator[Key]:
    """Keys of a section or component, those of tables inside of it with their dotted names."""
    for info in fields_of(cls):
        shape = shape_of(info.type)
        name, default = prefix + info.name, ""
        if shape.kind == "section":
            yield Key(name, "a table", "", "", info.doc)
            yield from keys(shape.type, f"{name}.")
            continue
        if shape.slot is not None:
            default = f"`{shape.slot.default}`" if shape.slot.default else ""
        elif info.required:
            default = "required"
        elif shape.kind == "leaf":
            default = "none" if info.default is None else f"`{value_text(written(info.default, shape.type))}`"
        yield Key(name, describe_shape(shape), default, info.key_class.value, info.doc)


def table(rows: Iterable[Key]) -> list[str]:
    """A Markdown table of keys; nothing without keys."""
    lines = [f"| `{row.name}` | {cell(row.takes)} | {cell(row.default)} | {row.resume} | {cell(row.doc)} |" for row in rows]
    return ["| key | takes | default | at a resume | |", "|---|---|---|---|---|", *lines] if lines else []


def cell(text: str) -> str:
    """Text that stays inside of its cell of a Markdown table."""
    return plain(text).replace("|", "\\|")


def plain(text: str) -> str:
    """Text of a docstring as Markdown: outside of backticks, no character means anything."""
    pieces = text.replace("\n", " ").split("`")
    for index in range(0, len(pieces), 2):
        for mark in "\\*_[]<>$":
            pieces[index] = pieces[index].replace(mark, "\\" + mark)
    return "`".join(pieces)


if __name__ == "__main__":
    for item in pages():
        item.write_text(page(item), encoding="utf-8")
