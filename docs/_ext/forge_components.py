"""Tables of keys, made from what is installed when the pages are built.

In a page, `components` with the name of a group gives every component of it with its keys, `sections` every plain section
of a recipe with its keys, `presets` every preset with what the comment at its head states.
"""

import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from forge_core.component import fields_of
from forge_core.config.fields import describe_shape, shape_of, written
from forge_core.config.toml import value_text
from forge_core.registry import GROUPS, Registry
from forge_train.recipe.load import load_recipe
from forge_train.recipe.schema import Job


class Components(SphinxDirective):
    """A definition and a table of keys for every component of a group, under a heading that can be linked to."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        group, registry = self.arguments[0], Registry()
        assert group in GROUPS, f"there is no plugin group {group}"
        lines: list[str] = []
        for entry in registry.of(group):
            component = registry.load_entry(entry)
            doc = plain(inspect.getdoc(component) or "")
            lines += [f"**`{entry.name}`** ({entry.distribution}): {doc}", "", *table(keys(component)), ""]
        return self.parse_text_to_nodes("\n".join(lines))


class Sections(SphinxDirective):
    """A table of keys for every section of a recipe that has keys of its own."""

    def run(self) -> list[nodes.Node]:
        lines: list[str] = []
        for info in fields_of(Job):
            shape = shape_of(info.type)
            if shape.kind == "section":
                lines += [f"**`[{info.name}]`** {plain(info.doc)}", "", *table(keys(shape.type)), ""]
            else:
                lines += [f"**`{info.name}`** ({describe_shape(shape)}): {plain(info.doc)}", ""]
        return self.parse_text_to_nodes("\n".join(lines))


class Presets(SphinxDirective):
    """Name, model, data and batch of every preset."""

    def run(self) -> list[nodes.Node]:
        registry = Registry()
        lines = ["| preset | what | parameters | GPUs | tokens a step |", "|---|---|---|---|---|"]
        for entry in registry.of("forge.presets"):
            text = registry.load_entry(entry).read_text(encoding="utf-8")
            head = [line.removeprefix("# ") for line in takewhile(lambda line: line.startswith("# "), text.splitlines())]
            facts = dict(line.split(": ", 1) for line in head if re.match(r"(Parameters|Active|GPUs): ", line))
            sized = next((number for number, line in enumerate(head) if line.startswith("Parameters: ")), len(head))
            what = " ".join(head[:sized])
            job: Any = load_recipe(entry.name, registry=registry).job
            tokens = job.train.global_batch * job.data.sequence_length
            lines.append(
                f"| `{entry.name}` | {cell(what)} | {facts.get('Parameters', '')} | {facts.get('GPUs', 'any')} | {tokens:,} |"
            )
        return self.parse_text_to_nodes("\n".join(lines))


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


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the directives."""
    app.add_directive("components", Components)
    app.add_directive("sections", Sections)
    app.add_directive("presets", Presets)
    return {"parallel_read_safe": True}
