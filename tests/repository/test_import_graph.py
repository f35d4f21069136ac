"""No circle between modules, when every import counts: those at the top, those inside functions, and those for types only."""

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("forge_parallel",)
"""Packages that hold to it."""


def modules_of(package: str) -> dict[str, Path]:
    """Every module by its dotted name. A package's own `__init__` is left out at the top: it names what its modules offer."""
    (source,) = (path for path in ROOT.glob(f"*/*/src/{package}") if path.is_dir())
    files = {file.relative_to(source.parent).with_suffix(""): file for file in sorted(source.rglob("*.py"))}
    named = {".".join(path.parts).removesuffix(".__init__"): file for path, file in files.items()}
    return {name: file for name, file in named.items() if name != package}


def imported(tree: ast.AST) -> Iterator[str]:
    """What may be a module, in every import statement wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield node.module


def graph_of(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Module -> modules of the same package that it imports."""
    return {name: {found for found in imported(ast.parse(text)) if found in sources} - {name} for name, text in sources.items()}


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """The modules of one circle in the order in which they import each other; none where there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_import_each_other_in_one_direction(package: str) -> None:
    graph = graph_of({name: file.read_text() for name, file in modules_of(package).items()})
    assert sum(map(len, graph.values())) > len(graph), "the walk sees the imports"
    assert circle(graph) == []


@pytest.mark.parametrize(
    "back",
    [
        "from p.a import thing",
        "def f():\n    from p import a",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import p.a",
    ],
)
def test_the_walk_finds_a_circle_wherever_an_import_stands(back: str) -> None:
    assert circle(graph_of({"p.a": "from p.b import other", "p.b": "from p.c import x", "p.c": back})) in (
        ["p.a", "p.b", "p.c", "p.a"],
        ["p.b", "p.c", "p.a", "p.b"],
        ["p.c", "p.a", "p.b", "p.c"],
    )
    assert circle(graph_of({"p.a": "from p.b import other", "p.b": "", "p.c": back})) == []
