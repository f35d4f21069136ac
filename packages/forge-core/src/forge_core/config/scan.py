"""Line numbers of the keys of a TOML document; `tomllib` parses values but keeps no positions.

The scanner walks a document that `tomllib` has already accepted, so it only has to find where keys and values begin
and end, not to judge them.
"""

import tomllib
from bisect import bisect_right

from forge_core.config.tree import Keys


def key_lines(text: str) -> dict[Keys, int]:
    """Line (from 1) of every key, table header and array item of a valid TOML document, by its path."""
    return _Scanner(text.replace("\r\n", "\n")).document()


def repeated_key(text: str) -> tuple[Keys, int, int | None]:
    """Of a document whose last key or header is one too many: its path, its line, and the line where it stood before.

    Where only a part of the path stood before (`a = {}`, then `a.b = 1`), that part is returned.
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
            self.lines[path] = line  # the table's own header, not that of a table inside it which came first
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
        """A dotted key; stops behind it, at `=` or `]`."""
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
