"""The table of faults, and of the promises that follow from them: `docs/faults.toml` and the tests that carry the numbers.

Tests are found in the sources, by their names, without being imported: `test_fault_5_...` shows fault 5,
`test_fault_2_and_7_...` two of them. `reference_tables.py` writes the tables into pages.
"""

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
_NAME = re.compile(r"test_fault_(\d+(?:_and_\d+)*)_[a-z]")
_LIKE = re.compile(r"test_(\w*_)?fault_?\d")


class Test(NamedTuple):
    """A test function: its file below the repository, and its name."""

    file: str
    name: str


def listed(key: str) -> list[dict[str, Any]]:
    """Every `fault`: `number`, `part`, `what`, `then`, and why it is `open` where it is; or every `promise`."""
    return tomllib.loads((ROOT / "docs" / "faults.toml").read_text(encoding="utf-8"))[key]


def numbers_of(name: str) -> tuple[int, ...]:
    """The faults that a test shows, by its name.

    Raises:
        ValueError: the name has the number of a fault somewhere else than it belongs.
    """
    if match := _NAME.match(name):
        return tuple(int(number) for number in match[1].split("_and_"))
    if _LIKE.match(name):
        raise ValueError(f"{name}: the number of a fault stands at the beginning, as in test_fault_5_a_page_is_zeroed")
    return ()


def tests(root: Path = ROOT / "tests") -> dict[int, list[Test]]:
    """The tests of each fault, by file."""
    found: defaultdict[int, list[Test]] = defaultdict(list)
    for file in sorted(root.rglob("test_*.py")):
        source = file.read_text(encoding="utf-8")
        if "fault" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for number in numbers_of(node.name):
                    found[number].append(Test(file.relative_to(root.parent).as_posix(), node.name))
    return dict(found)


def table_of_faults(found: Mapping[int, list[Test]]) -> Iterator[str]:
    """Lines of Markdown: a heading and a table for each part of the list."""
    part = ""
    for fault in listed("fault"):
        if fault["part"] != part:
            part = fault["part"]
            yield from ("", f"**{part}**", "", "| | fault | what Forge does | tests |", "|---|---|---|---|")
        yield f"| {fault['number']} | {fault['what']} | {fault['then']} | {_cell(fault, found)} |"


def table_of_promises(found: Mapping[int, list[Test]]) -> Iterator[str]:
    """Lines of a Markdown table: each promise, and the tests of the faults that it is made of."""
    yield from ("| | promise | shown by |", "|---|---|---|")
    by_number = {fault["number"]: fault for fault in listed("fault")}
    for promise in listed("promise"):
        shown = "<br>".join(f"fault {number}: {_cell(by_number[number], found)}" for number in promise["faults"])
        yield f"| {promise['name']} | {promise['says']} | {shown} |"


def said(name: str) -> str:
    """A test's name as words: what it shows, without the numbers."""
    return name[len(_NAME.match(name)[0]) - 1 :].replace("_", " ")  # type: ignore[index]


def _cell(fault: Mapping[str, Any], found: Mapping[int, list[Test]]) -> str:
    """The tests of one fault, or why it has none."""
    if fault["number"] not in found:
        return f"open: {fault['open']}"
    files = defaultdict(list)
    for file, name in found[fault["number"]]:
        files[file].append(said(name))
    return "<br>".join(f"`{file.removeprefix('tests/')}`: {'; '.join(names)}" for file, names in files.items())
