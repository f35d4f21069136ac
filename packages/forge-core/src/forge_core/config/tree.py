"""The untyped tree of a recipe: every value with the place that it came from."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT = "default"
"""Origin of a value that no layer gave."""

UNSET = "none"
"""TOML has no null: this text unsets an optional key."""

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_PLUGIN_FILE = re.compile(r"(?P<file>.+\.py):(?P<attribute>[A-Za-z_]\w*)")


@dataclass(frozen=True)
class Leaf:
    """A value without keys: text, number, boolean, date or an unset marker."""

    value: Any
    origin: str


@dataclass(frozen=True)
class Table:
    """A TOML table. `edits` marks one from the command line, whose numeric keys address the items of a list."""

    items: "dict[str, Node]"
    origin: str
    edits: bool = False


@dataclass(frozen=True)
class Array:
    """A TOML array, of tables or of values."""

    items: "list[Node]"
    origin: str


DEEPEST = 60
"""Tables and arrays inside each other, at most; those of a recipe are a handful."""

TOO_DEEP = f"tables and arrays stand more than {DEEPEST} deep in each other"

Node = Leaf | Table | Array
Keys = tuple[str | int, ...]


def is_too_deep(value: Any) -> bool:
    """Whether a parsed document goes deeper than what is walked by functions that call themselves."""
    level = [value]
    for _ in range(DEEPEST):
        level = [
            item
            for one in level
            for item in (one.values() if isinstance(one, dict) else one if isinstance(one, list) else ())
            if isinstance(item, dict | list)
        ]
        if not level:
            return False
    return True


def build(value: Any, path: Keys, origin_of: Callable[[Keys], str], folder: Path) -> Node:
    """The node of a parsed TOML value; file plugins in it are made absolute from `folder`."""
    origin = origin_of(path)
    if isinstance(value, dict):
        return Table({absolute(k, folder): build(v, (*path, k), origin_of, folder) for k, v in value.items()}, origin)
    if isinstance(value, list):
        return Array([build(v, (*path, i), origin_of, folder) for i, v in enumerate(value)], origin)
    if path and path[-1] == "name" and isinstance(value, str):
        return Leaf(absolute(value, folder), origin)
    return Leaf(value, origin)


def absolute(name: str, folder: Path) -> str:
    """`./mine.py:Thing` with the file made absolute from `folder`; any other name as it is."""
    found = _PLUGIN_FILE.fullmatch(name)
    return f"{(folder / found['file']).resolve()}:{found['attribute']}" if found else name


def plugin_files(node: Node) -> Iterator[str]:
    """Files of the components that a tree names, in values of `name` and in keys of tables."""
    named = [*node.items, getattr(node.items.get("name"), "value", None)] if isinstance(node, Table) else []
    for name in named:
        if isinstance(name, str) and (found := _PLUGIN_FILE.fullmatch(name)):
            yield found["file"]
    for item in node.items.values() if isinstance(node, Table) else node.items if isinstance(node, Array) else ():
        yield from plugin_files(item)


def plain(node: Node) -> Any:
    """The node as dictionaries, lists and values."""
    if isinstance(node, Table):
        return {key: plain(item) for key, item in node.items.items()}
    if isinstance(node, Array):
        return [plain(item) for item in node.items]
    return node.value


def leaves(node: Node, key: str = "") -> Iterator[tuple[str, Any, str]]:
    """(dotted key, value, origin) of every value, in order; an empty table or array counts as a value."""
    if isinstance(node, Table) and (node.items or not key):
        for name, item in node.items.items():
            yield from leaves(item, join(key, name))
    elif isinstance(node, Array) and any(not isinstance(item, Leaf) for item in node.items):
        for index, item in enumerate(node.items):
            yield from leaves(item, join(key, str(index)))
    else:
        yield key, plain(node), node.origin


def origin_at(tree: Node, key: str) -> str:
    """Origin of the value at a dotted key, or of the nearest table above it; empty when nothing is there."""
    found = tree
    for part in key.split("."):
        if isinstance(found, Table) and part in found.items:
            found = found.items[part]
        elif isinstance(found, Array) and part.isdecimal() and int(part) < len(found.items):
            found = found.items[int(part)]
        else:
            break
    return found.origin


def given_at(node: Node) -> str:
    """Where the keys of a table come from that are not defaults; the table's own origin when all are."""
    items = node.items.values() if isinstance(node, Table) else ()
    return ", ".join(dict.fromkeys(item.origin for item in items if item.origin != DEFAULT)) or node.origin


def join(key: str, part: str) -> str:
    """The dotted key of `part` inside `key`, quoted where TOML needs it."""
    part = part if _BARE.fullmatch(part) else json.dumps(part, ensure_ascii=False)
    return f"{key}.{part}" if key else part
