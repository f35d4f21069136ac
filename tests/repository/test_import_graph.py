"""Imports go one way, when every import counts: those at the top, those inside functions, and those for types only."""

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from harness.fronts import FRONTS

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.name for path in ROOT.glob("*/*/src/forge_*") if path.parents[2].name != "examples")
ONE_WAY = ("forge_core", "forge_ckpt", "forge_data")
"""Packages whose folders import each other in one direction too."""
READ_RECIPES = {
    *("forge_data.checks", "forge_data.commands.mix", "forge_models.checks", "forge_train.recipe.checks"),
    *("forge_parallel.verify.proofs", "forge_parallel.foreign.module", "forge_models.upcycle", "forge_vlm.checks"),
    *("forge_testing.checks.data", "forge_testing.checks.vision", "forge_testing.modules"),
}
"""Modules that may know components, because they read recipes, give defaults to those who have none, or try parts with others."""


def modules_of(package: str) -> dict[str, Path]:
    """Every module by its dotted name, without fronts, which name what modules offer."""
    (source,) = (path for path in ROOT.glob(f"*/*/src/{package}") if path.is_dir())
    files = {file.relative_to(source.parent).with_suffix(""): file for file in sorted(source.rglob("*.py"))}
    named = {".".join(path.parts).removesuffix(".__init__"): file for path, file in files.items()}
    return {name: file for name, file in named.items() if name not in FRONTS}


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
    assert len(graph) < 20 or sum(map(len, graph.values())) > len(graph), "the walk sees the imports"
    assert circle(graph) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_imports_a_name_from_a_front_of_its_package(package: str) -> None:
    """The walk leaves fronts out, so a circle through one would not be seen."""
    modules = modules_of(package)
    for file in modules.values():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module in FRONTS and node.module.partition(".")[0] == package:
                assert [alias.name for alias in node.names if f"{node.module}.{alias.name}" not in modules] == [], file


@pytest.mark.parametrize("package", ONE_WAY)
def test_folders_import_each_other_in_one_direction(package: str) -> None:
    graph = graph_of({name: file.read_text() for name, file in modules_of(package).items()})
    assert circle(folders(graph)) == []


def folders(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The same graph of the folders below the package."""
    found: dict[str, set[str]] = {}
    for name, others in graph.items():
        found.setdefault(_folder(name), set()).update(map(_folder, others))
    return {name: others - {name} for name, others in found.items()}


def _folder(module: str) -> str:
    return ".".join(module.split(".")[:2])


@pytest.mark.parametrize("package", PACKAGES)
def test_only_what_reads_recipes_imports_a_component(package: str) -> None:
    """A reader of configurations, such as those of Hugging Face, makes components."""
    graph = graph_of({name: file.read_text() for name, file in modules_of(package).items()})
    users = {name for name, others in graph.items() if any(f"{package}.components" in other for other in others)}
    readers = ("forge_models.gguf.", "forge_models.hf.", "forge_vlm.hf.")
    assert {name for name in users if ".components" not in name and not name.startswith(readers)} <= READ_RECIPES


@pytest.mark.parametrize("package", PACKAGES)
def test_no_class_is_imported_under_another_name(package: str) -> None:
    """`X as X` marks a public name."""
    for file in modules_of(package).values():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("forge_"):
                renamed = [alias.name for alias in node.names if alias.asname not in (None, alias.name)]
                assert [name for name in renamed if name[0].isupper() and not name.isupper()] == [], file


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


def test_the_walk_finds_a_circle_of_folders() -> None:
    graph = graph_of({"p.a.x": "import p.b.y", "p.b.y": "", "p.b.z": "import p.a.w", "p.a.w": ""})
    assert circle(graph) == []
    assert sorted(set(circle(folders(graph)))) == ["p.a", "p.b"]
