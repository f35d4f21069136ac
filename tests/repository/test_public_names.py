"""Fronts: what a package offers by its own name is there, and costs nothing until it is used."""

import ast
import difflib
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest

from forge_core.exports import type_checking_imports
from harness.fronts import DISTRIBUTIONS, FRONTS, RECORD, described, example_of, public_names


def test_every_distribution_has_a_front() -> None:
    assert {name.replace("-", "_") for name in DISTRIBUTIONS} <= set(FRONTS)


@pytest.mark.parametrize("front", FRONTS)
def test_every_public_name_resolves(front: str) -> None:
    module = import_module(front)
    assert dir(module) == sorted(module.__all__)
    neighbors = {path.stem for path in FRONTS[front].parent.iterdir() if path.suffix == ".py" or path.is_dir()}
    for name in module.__all__:
        assert getattr(module, name) is not None
        assert name not in neighbors, f"{front}.{name} would be the module, once somebody imported it"
    with pytest.raises(AttributeError, match="nonsense"):
        module.nonsense  # noqa: B018


@pytest.mark.parametrize("front", FRONTS)
def test_a_front_contains_its_names_and_nothing_else(front: str) -> None:
    source = FRONTS[front].read_text()
    docstring, typing, exports, guarded, names, lazy = ast.parse(source).body
    assert isinstance(docstring, ast.Expr)
    assert [ast.unparse(node) for node in (typing, exports)] == [
        "from typing import TYPE_CHECKING",
        "from forge_core.exports import lazy_exports",
    ]
    assert isinstance(guarded, ast.If) and all(isinstance(node, ast.ImportFrom) for node in guarded.body)
    assert isinstance(names, ast.Assign) and ast.unparse(names.targets[0]) == "__all__"
    assert set(ast.literal_eval(names.value)) == set(type_checking_imports(source))
    assert ast.unparse(lazy) == "__getattr__, __dir__ = lazy_exports(__name__)"


@pytest.mark.parametrize("front", FRONTS)
def test_a_front_has_a_short_example_that_uses_it(front: str) -> None:
    example = example_of(front)
    imports = [node for node in ast.walk(ast.parse(example)) if isinstance(node, ast.ImportFrom) and node.module == front]
    assert imports and len(example.strip().splitlines()) <= 16, example


def test_importing_the_packages_imports_no_torch() -> None:
    code = f"import sys, {', '.join(FRONTS)}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_are_those_on_record() -> None:
    recorded, today = (text.splitlines() for text in (RECORD.read_text(), public_names()))
    assert not (text := "\n".join(difflib.unified_diff(recorded, today, "on record", "today", n=0, lineterm=""))), (
        f"public names or signatures differ from {RECORD.name}:\n{text}\nIf the change is intended, say in the commit what users "
        "have to change, and run `PYTHONPATH=tests python -m harness.fronts`"
    )


def test_a_signature_is_the_same_text_in_every_version_of_python() -> None:
    def function(a: "int | None", /, b: Path = Path(), *rest: str, c: float = 0.5, d: str = "x", **more: int) -> None: ...

    @dataclass(kw_only=True)
    class Section:
        size: int
        names: list[str] = field(default_factory=list)
        betas: tuple[float, float] = (0.9, 0.95)

    class Pair(NamedTuple):
        first: int
        second: int | None = None

    class Reader(Protocol):
        def read(self) -> str: ...

    class Kind(Enum):
        A, B = "a", "b"

    for value in (Section, Pair, Reader, Kind):
        value.__module__ = "forge_core.example"
    assert described(function) == "(a, /, b=..., *rest, c=0.5, d='x', **more)"
    assert described(Section) == "(*, size, names=..., betas=(0.9, 0.95))"
    assert described(Pair) == "(first, second=None)"
    assert described(Reader) == "" and described(ValueError) == "" and described(3) == ": int"
    assert described(Mapping[str, int]) == described(int | None) == ": type"
    assert described(Kind) == " = A | B"
