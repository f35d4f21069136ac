"""The command line as a layer: `--section.key=value`, nothing else.

A value parses as TOML, else it is text. What shells and habits make of it (a bare argument, a space for the equals
sign, a key twice) is a fault, because guessing would train something else than was meant.
"""

import datetime
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forge_core.config.tree import DEEPEST, TOO_DEEP, Leaf, Node, Table, build, is_too_deep, join
from forge_core.errors import Fault

ORIGIN = "command line"


def parse_overrides(arguments: Sequence[str], folder: Path) -> tuple[Table, list[Fault]]:
    """The layer and everything wrong with it; plugin files in it are relative to `folder`."""
    root = Table({}, ORIGIN, edits=True)
    faults: list[Fault] = []
    given: set[str] = set()
    skip = False
    for position, argument in enumerate(arguments):
        if skip:
            skip = False
            continue
        if not argument.startswith("--"):
            faults.append(_bare(argument))
            continue
        name, equals, text = argument.partition("=")
        if not equals:
            following = arguments[position + 1] if position + 1 < len(arguments) else "--"
            skip = not following.startswith("-")
            hint = f"write {name}={following}" if skip else f"write {name}=VALUE (a switch: {name}=true)"
            faults.append(Fault(name[2:] or argument, "has no value", argument, hint))
            continue
        try:
            path = _path(name[2:])
        except ValueError:
            faults.append(Fault(argument, "is not a key", argument, "overrides are written --section.key=value"))
            continue
        dotted = ".".join(path)
        try:
            value = _value(text)
        except RecursionError:
            value = None
        if value is None or len(path) > DEEPEST or is_too_deep(value):
            faults.append(Fault(dotted[:80], TOO_DEEP, name[:80]))
            continue
        if dotted in given:
            faults.append(Fault(dotted, "is given twice", name, "keep one of them"))
            continue
        given.add(dotted)
        try:
            _insert(root, path, build(value, tuple(path), lambda _, name=name: name, folder), name)
        except KeyError as clash:
            faults.append(Fault(dotted, f"is set both as a value and as a table ({clash.args[0]})", name, "keep one of them"))
    return root, faults


def _bare(argument: str) -> Fault:
    key, equals, _ = argument.partition("=")
    hint = f"write --{argument.lstrip('-')}" if equals and "." in key else "overrides are written --section.key=value"
    return Fault(argument, "is a bare argument", ORIGIN, hint)


def _path(text: str) -> list[str]:
    """The parts of a dotted TOML key."""
    try:
        parsed: Any = tomllib.loads(f"{text} = 0")
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(text) from error
    path: list[str] = []
    while isinstance(parsed, dict):
        if len(parsed) != 1:
            raise ValueError(text)
        ((part, parsed),) = parsed.items()
        path.append(part)
    return path


def _value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = parsed["value"]
    commented = "#" in text and not isinstance(value, str | list | dict)
    dates = isinstance(value, datetime.date | datetime.time)
    return text if len(parsed) != 1 or commented or dates else value


def _insert(table: Table, path: list[str], node: Node, origin: str) -> None:
    for depth, part in enumerate(path[:-1]):
        found = table.items.setdefault(part, Table({}, origin, edits=True))
        if not isinstance(found, Table):
            raise KeyError(join("--" + ".".join(path[:depth]), part) if depth else f"--{part}")
        table = found
    last = path[-1]
    if last in table.items:
        raise KeyError("--" + ".".join(path))
    table.items[last] = Leaf(node.value, origin) if isinstance(node, Leaf) else node
