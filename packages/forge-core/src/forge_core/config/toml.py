"""Reads TOML files to a tree with the line of every value, and writes TOML from plain values.

`tomllib` parses values but does not record positions, so a scanner finds the lines of keys. It scans documents that `tomllib` has
accepted, so it only needs to find where keys and values begin and end.
"""

import codecs
import json
import os
import re
import tomllib
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forge_core.config.tree import TOO_DEEP, Keys, Table, build, is_too_deep, join
from forge_core.errors import ConfigError, Fault
from forge_core.files import lines_of


def read_toml(path: Path) -> Table:
    """Reads a TOML file to a tree; the origin of each value is its file and line.

    Raises:
        ConfigError: the file cannot be read or is not TOML.
    """
    shown = shown_path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError([Fault(shown, f"cannot be read: {error.strerror}")]) from error
    try:
        text = content.removeprefix(codecs.BOM_UTF8).decode()  # some editors write a byte order mark
    except UnicodeDecodeError as error:
        if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise ConfigError([Fault(shown, "is UTF-16 text", hint="save it as UTF-8")]) from error
        raise ConfigError([Fault(shown, f"is not UTF-8 text (byte {error.start})", hint="save it as UTF-8")]) from error
    try:
        parsed = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError([_syntax(shown, text, error)]) from error
    except RecursionError:
        raise ConfigError([Fault(shown, TOO_DEEP)]) from None
    if is_too_deep(parsed):
        raise ConfigError([Fault(shown, TOO_DEEP)])
    lines = key_lines(text)

    def origin(at: tuple[str | int, ...]) -> str:
        return f"{shown}:{lines[at]}" if at in lines else shown

    table = build(parsed, (), origin, path.parent)
    assert isinstance(table, Table)
    return table


def _syntax(shown: str, text: str, error: tomllib.TOMLDecodeError) -> Fault:
    at = re.search(r"\(at line (\d+), column (\d+)\)|\(at end of document\)", str(error))
    line = int(at[1]) if at and at[1] else max(len(lines_of(text)), 1)
    if str(error).startswith(_TWICE):
        return _twice(shown, "\n".join(text.replace("\r\n", "\n").split("\n")[:line]))
    written = lines_of(text)[line - 1].strip() if line <= len(lines_of(text)) else ""
    hint = "text needs quotes; booleans are true and false" if "Invalid value" in str(error) else ""
    message = f"is not valid TOML: {str(error).split(' (at ')[0]}" + (f" in `{written}`" if written else "")
    return Fault(shown, message, f"{shown}:{line}", hint)


_TWICE = ("Cannot declare", "Cannot overwrite", "Cannot mutate", "Cannot redefine")
"""Beginnings of tomllib's messages about a repeated key or table."""


def _twice(shown: str, text: str) -> Fault:
    """Returns the fault of a text whose last key or header is a repetition."""
    path, line, first = repeated_key(text)
    name = ".".join(map(str, path))
    if text.split("\n")[line - 1].lstrip().startswith("["):
        name = f"[{name}]"
    return Fault(shown, f"{name} is given twice" + (f", first on line {first}" if first else ""), f"{shown}:{line}")


def shown_path(path: Path) -> str:
    """Returns the path for messages: relative if it is below the working directory."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def key_lines(text: str) -> dict[Keys, int]:
    """Returns the line (from 1) of every key, table header and array item of a valid TOML document, by its path."""
    return _Scanner(text.replace("\r\n", "\n")).document()


def repeated_key(text: str) -> tuple[Keys, int, int | None]:
    """For a document whose last key or header is a repetition, returns its path, its line, and its first line.

    If only a part of the path occurred before (`a = {}`, then `a.b = 1`), the path is this part.
    """
    scanner = _Scanner(text.replace("\r\n", "\n"))
    scanner.document()
    *before, (path, line) = scanner.met
    first: dict[Keys, int] = {}
    for keys, at in before:
        for end in range(len(keys), 0, -1):
            first.setdefault(keys[:end], at)
    part = next((path[:end] for end in range(len(path), 0, -1) if path[:end] in first), path)
    return part, line, first.get(part)


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.breaks = [index for index, letter in enumerate(text) if letter == "\n"]
        self.lines: dict[Keys, int] = {}
        self.arrays: dict[Keys, int] = {}  # arrays of tables: number of items so far
        self.met: list[tuple[Keys, int]] = []  # every key and header in the order of the text, with its line

    def document(self) -> dict[Keys, int]:
        prefix: Keys = ()
        self.blank()
        while self.at < len(self.text):
            if self.text.startswith("[[", self.at):
                prefix = self.header(2, array=True)
            elif self.text[self.at] == "[":
                prefix = self.header(1, array=False)
            else:
                self.pair(prefix)
            self.blank()
        return self.lines

    def header(self, brackets: int, *, array: bool) -> Keys:
        line = self.line()
        self.at += brackets
        names = self.key()
        self.at += brackets
        path: Keys = ()
        for position, name in enumerate(names):
            path = (*path, name)
            self.lines.setdefault(path, line)
            if array and position == len(names) - 1:
                self.arrays[path] = self.arrays.get(path, 0) + 1
            if path in self.arrays:
                path = (*path, self.arrays[path] - 1)
                self.lines.setdefault(path, line)
        if not array:
            self.lines[path] = line  # its own header takes precedence over an earlier header of a table inside it
        self.met.append((path, line))
        return path

    def pair(self, prefix: Keys) -> None:
        line = self.line()
        path = prefix
        for name in self.key():
            path = (*path, name)
            self.lines.setdefault(path, line)
        self.met.append((path, line))
        self.at += 1  # the equals sign
        self.spaces()
        self.value(path)

    def key(self) -> list[str]:
        """Reads a dotted key, up to the `=` or `]` after it."""
        names: list[str] = []
        while True:
            self.spaces()
            start = self.at
            if self.text[self.at] in "\"'":
                self.string()
            else:
                while self.text[self.at] not in " \t.=]":
                    self.at += 1
            raw = self.text[start : self.at]
            names.append(tomllib.loads(f"k = {raw}")["k"] if raw[0] in "\"'" else raw)
            self.spaces()
            if self.text[self.at] != ".":
                return names
            self.at += 1

    def value(self, path: Keys) -> None:
        letter = self.text[self.at]
        if letter in "\"'":
            self.string()
        elif letter == "[":
            self.array(path)
        elif letter == "{":
            self.at += 1
            self.blank()
            while self.text[self.at] != "}":
                self.pair(path)
                self.blank()
                if self.text[self.at] == ",":
                    self.at += 1
                    self.blank()
            self.at += 1
        else:
            while self.at < len(self.text) and self.text[self.at] not in ",]}#\n":
                self.at += 1

    def array(self, path: Keys) -> None:
        self.at += 1
        index = 0
        self.blank()
        while self.text[self.at] != "]":
            self.lines[(*path, index)] = self.line()
            self.value((*path, index))
            index += 1
            self.blank()
            if self.text[self.at] == ",":
                self.at += 1
                self.blank()
        self.at += 1

    def string(self) -> None:
        quote = self.text[self.at]
        if not self.text.startswith(quote * 3, self.at):
            self.at += 1
            while self.text[self.at] != quote:
                self.at += 2 if quote == '"' and self.text[self.at] == "\\" else 1
            self.at += 1
            return
        self.at += 3
        while not self.text.startswith(quote * 3, self.at):
            self.at += 2 if quote == '"' and self.text[self.at] == "\\" else 1
        self.at += 3
        for _ in range(2):  # a multi-line string may end in one or two quotes that belong to its text
            if self.text.startswith(quote, self.at):
                self.at += 1

    def spaces(self) -> None:
        while self.at < len(self.text) and self.text[self.at] in " \t":
            self.at += 1

    def blank(self) -> None:
        """Skips spaces, line ends and comments."""
        while self.at < len(self.text) and self.text[self.at] in " \t\n#":
            if self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                self.at += 1

    def line(self) -> int:
        return bisect_right(self.breaks, self.at - 1) + 1


_BARE = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(tree: Mapping[str, Any], notes: Mapping[str, str] | None = None) -> str:
    """Returns a TOML document that parses to an equal tree.

    Args:
        tree: plain values.
        notes: comments for the lines of keys, by dotted key.

    Raises:
        ValueError: TOML cannot represent a value, such as None.
    """
    return "\n".join(_table(tree, (), "", notes or {})).strip("\n") + "\n"


def _table(table: Mapping[str, Any], path: tuple[str, ...], at: str, notes: Mapping[str, str]) -> Iterator[str]:
    """Yields the lines of a table. `path` is its header; `at` its dotted key, with indexes of arrays of tables."""
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
    # JSON's escapes are valid in TOML, except that JSON does not escape DEL, and in ASCII splits large code points in two.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def value_text(value: Any) -> str:
    """Returns a value as TOML on one line."""
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
