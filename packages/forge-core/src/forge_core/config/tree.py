"""The untyped tree of a recipe: every value with its origin."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT = "default"
"""Origin of a value that no layer sets."""

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
    """A TOML table. `edits`: it comes from the command line, so its numeric keys are indexes of list items."""

    items: "dict[str, Node]"
    origin: str
    edits: bool = False


@dataclass(frozen=True)
class Array:
    """A TOML array, of tables or of values."""

    items: "list[Node]"
    origin: str


DEEPEST = 60
"""Maximum depth of nested tables and arrays; recipes need only a few levels."""

TOO_DEEP = f"tables and arrays are nested more than {DEEPEST} levels deep"

Node = Leaf | Table | Array
Keys = tuple[str | int, ...]


def is_too_deep(value: Any) -> bool:
    """Whether a parsed document is nested deeper than `DEEPEST`, which protects recursive functions."""
    level = [value]
    for _ in range(DEEPEST):
        level = [
            item
            for parent in level
            for item in (parent.values() if isinstance(parent, dict) else parent if isinstance(parent, list) else ())
            if isinstance(item, dict | list)
        ]
        if not level:
            return False
    return True


def build(value: Any, path: Keys, origin_of: Callable[[Keys], str], folder: Path) -> Node:
    """Returns the node of a parsed TOML value; plugin files in it become absolute, relative to `folder`."""
    origin = origin_of(path)
    if isinstance(value, dict):
        return Table({absolute(k, folder): build(v, (*path, k), origin_of, folder) for k, v in value.items()}, origin)
    if isinstance(value, list):
        return Array([build(v, (*path, i), origin_of, folder) for i, v in enumerate(value)], origin)
    if path and path[-1] == "name" and isinstance(value, str):
        return Leaf(absolute(value, folder), origin)
    return Leaf(value, origin)


def absolute(name: str, folder: Path) -> str:
    """Makes the file of `./mine.py:Thing` absolute, relative to `folder`; returns other names unchanged."""
    match = _PLUGIN_FILE.fullmatch(name)
    return f"{(folder / match['file']).resolve()}:{match['attribute']}" if match else name


def plugin_files(node: Node) -> Iterator[str]:
    """Yields the files of components that a tree names in values of `name` and in keys of tables."""
    named = [*node.items, getattr(node.items.get("name"), "value", None)] if isinstance(node, Table) else []
    for name in named:
        if isinstance(name, str) and (match := _PLUGIN_FILE.fullmatch(name)):
            yield match["file"]
    for item in node.items.values() if isinstance(node, Table) else node.items if isinstance(node, Array) else ():
        yield from plugin_files(item)


def plain(node: Node) -> Any:
    """Converts a node to dictionaries, lists and values."""
    if isinstance(node, Table):
        return {key: plain(item) for key, item in node.items.items()}
    if isinstance(node, Array):
        return [plain(item) for item in node.items]
    return node.value


def leaves(node: Node, key: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yields (dotted key, value, origin) of every value, in order; an empty table or array counts as a value."""
    if isinstance(node, Table) and (node.items or not key):
        for name, item in node.items.items():
            yield from leaves(item, join(key, name))
    elif isinstance(node, Array) and any(not isinstance(item, Leaf) for item in node.items):
        for index, item in enumerate(node.items):
            yield from leaves(item, join(key, str(index)))
    else:
        yield key, plain(node), node.origin


def origin_at(tree: Node, key: str) -> str:
    """Returns the origin of the value at a dotted key, or of the nearest existing table above it."""
    node = tree
    for part in key.split("."):
        if isinstance(node, Table) and part in node.items:
            node = node.items[part]
        elif isinstance(node, Array) and part.isdecimal() and int(part) < len(node.items):
            node = node.items[int(part)]
        else:
            break
    return node.origin


def given_at(node: Node) -> str:
    """Returns the origins of the keys of a table, without defaults; if all keys are defaults, the origin of the table."""
    items = node.items.values() if isinstance(node, Table) else ()
    return ", ".join(dict.fromkeys(item.origin for item in items if item.origin != DEFAULT)) or node.origin


def join(key: str, part: str) -> str:
    """Returns the dotted key of `part` in `key`, quoted if TOML requires it."""
    part = part if _BARE.fullmatch(part) else json.dumps(part, ensure_ascii=False)
    return f"{key}.{part}" if key else part
