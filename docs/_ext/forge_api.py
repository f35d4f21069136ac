"""Pages of the public API from docstrings: `package` with a name gives every public module of that package.

Docstrings of Forge are plain text with `code` in backticks, Google's sections (Args, Raises, Attributes) and indented
blocks that are shown as they stand. They are made into reStructuredText here, so that nobody has to write that.
"""

import importlib
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

_SECTION = re.compile(r"(Args|Raises|Attributes|Returns|Yields|Example|Examples):$")
_BULLET = re.compile(r"([-*]|\d+\.) ")
_MARKUP = re.compile(r"[*|]|(?<=\w)_(?!\w)")


class Package(SphinxDirective):
    """One `automodule` for each public module. What a front exports is described where it is defined."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        lines = ["```{eval-rst}"]
        for module in modules(self.arguments[0]):
            lines += [f".. rubric:: {module}", "", f".. automodule:: {module}", "   :members:", "   :ignore-module-all:", ""]
        return self.parse_text_to_nodes("\n".join([*lines, "```"]))


def modules(package: str) -> Iterator[str]:
    """Names of a package and of all its public modules, parents first."""
    yield package
    found = importlib.import_module(package)
    for module in pkgutil.walk_packages(found.__path__, f"{package}."):
        if not any(part.startswith("_") for part in module.name.split(".")):
            yield module.name


def as_rst(lines: list[str]) -> list[str]:
    """A docstring of ours as reStructuredText with Google's sections left as they are."""
    result: list[str] = []
    section = literal = False
    above = ""  # the nearest line before that was not blank
    for line in lines:
        text = line.strip()
        indented = line.startswith((" ", "\t"))
        if not text:
            result.append("")
            continue
        if not indented:
            section, literal = bool(_SECTION.match(line)), False
            if _BULLET.match(text) and above and not _BULLET.match(above) and result[-1]:
                result.append("")
        elif not section and not literal and not _BULLET.match(above) and not above.startswith((" ", "\t")):
            literal = True
            result += [*([""] if result and result[-1] else []), "::", ""]
        if not indented and above.startswith((" ", "\t")) and result[-1]:
            result.append("")
        result.append(line if literal else escaped(line))
        above = line
    return result


def escaped(line: str) -> str:
    """The line with every character outside of backticks meaning itself."""
    pieces = line.split("`")
    if len(pieces) % 2 == 0:  # code that goes on in the next line
        return line
    lead = re.match(r"\s*([-*] )?", pieces[0])
    head = lead[0] if lead else ""
    pieces[0] = pieces[0][len(head) :]
    for index in range(0, len(pieces), 2):
        text = _MARKUP.sub(lambda found: "\\" + found[0], pieces[index])
        after = "\\ " if index and text[:1].isalnum() else ""  # code that a letter follows, such as a plural's
        before = "\\ " if index + 1 < len(pieces) and text[-1:].isalnum() else ""
        pieces[index] = after + text + before
    return head + "`".join(pieces)


def _docstring(*given: Any) -> None:
    """Called with the lines of a docstring as its last argument, to be changed in place."""
    lines: list[str] = given[-1]
    lines[:] = as_rst(lines)


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the directive, and the docstrings' way to it ahead of napoleon."""
    app.add_directive("package", Package)
    app.connect("autodoc-process-docstring", _docstring, priority=400)
    return {"parallel_read_safe": True}
