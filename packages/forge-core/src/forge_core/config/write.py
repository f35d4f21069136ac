"""Writes plain values as TOML: the way back from a resolved tree to a file."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from forge_core.config.tree import join

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(tree: Mapping[str, Any], notes: Mapping[str, str] | None = None) -> str:
    """A TOML document that parses to an equal tree.

    Args:
        tree: plain values.
        notes: dotted key -> a comment behind its line.

    Raises:
        ValueError: a value has no TOML form (None, for one).
    """
    return "\n".join(_table(tree, (), "", notes or {})).strip("\n") + "\n"


def _table(table: Mapping[str, Any], path: tuple[str, ...], at: str, notes: Mapping[str, str]) -> Iterator[str]:
    """Lines of a table. `path` is its header; `at` its dotted key, which counts the items of arrays of tables."""
    below = {name: value for name, value in table.items() if isinstance(value, Mapping) or _is_tables(value)}
    for name, value in table.items():
        if name not in below:
            note = notes.get(join(at, name))
            yield f"{_key(name)} = {value_text(value)}" + (f"  # {note}" if note else "")
    for name, value in below.items():
        inner = (*path, name)
        title = ".".join(_key(part) for part in inner)
        if isinstance(value, Mapping):
            yield from ("", f"[{title}]")
            yield from _table(value, inner, join(at, name), notes)
        else:
            for index, item in enumerate(value):
                yield from ("", f"[[{title}]]")
                yield from _table(item, inner, join(join(at, name), str(index)), notes)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _text(name)


def _text(value: str) -> str:
    # JSON's escapes are TOML's, except that JSON leaves DEL as it is and splits large code points in two when in ASCII.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def value_text(value: Any) -> str:
    """One value on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        return repr(float(value))
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(name)} = {value_text(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(value_text(item) for item in value) + "]"
    raise ValueError(f"{value!r} has no TOML form")
