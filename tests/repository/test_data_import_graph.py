"""forge_data imports in one direction: every import counts, whether at the top, inside a function or for types only."""

import ast
from collections.abc import Collection
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "packages/forge-data/src"
READS_RECIPES = {"forge_data.checks", "forge_data.commands.recipe_data"}
"""Modules that may know components, because they read recipes."""
MOST_MODULES = 15


def graph_of(source: Path) -> dict[str, set[str]]:
    """The modules that each module below `source` imports, anywhere in its text."""
    names = {name_of(source, file): file for file in source.rglob("*.py")}
    return {name: imported(file.read_text(), names.keys()) - {name} for name, file in names.items()}


def name_of(source: Path, file: Path) -> str:
    return ".".join(file.relative_to(source).with_suffix("").parts).removesuffix(".__init__")


def imported(text: str, names: Collection[str]) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in names else str(node.module) for name in inside}
    return found & set(names)


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one circle, or an empty list."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def rooms(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same graph of folders below the package."""
    found: dict[str, set[str]] = {}
    for name, imports in graph.items():
        found.setdefault(room(name), set()).update(room(other) for other in imports)
    return {name: others - {name} for name, others in found.items()}


def room(name: str) -> str:
    return ".".join(name.split(".")[:2])


def test_modules_import_in_one_direction() -> None:
    assert circle(graph_of(SOURCE)) == []


def test_folders_import_in_one_direction_too() -> None:
    assert circle(rooms(graph_of(SOURCE))) == []


def test_only_what_reads_recipes_imports_a_component() -> None:
    graph = graph_of(SOURCE)
    users = {name for name, imports in graph.items() if any(".components" in other for other in imports)}
    assert {name for name in users if ".components" not in name} <= READS_RECIPES


def test_no_class_is_imported_under_another_name() -> None:
    """`X as X` marks a public name."""
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("forge_"):
                renamed = [alias.name for alias in node.names if alias.asname not in (None, alias.name)]
                assert [name for name in renamed if name[0].isupper()] == [], file


def test_no_folder_is_crowded() -> None:
    for folder in {file.parent for file in SOURCE.rglob("*.py")}:
        modules = [file for file in folder.glob("*.py") if file.name != "__init__.py"]
        assert len(modules) <= MOST_MODULES, f"{folder.relative_to(SOURCE)} has {len(modules)} modules"


@pytest.mark.parametrize(
    "import_", ["import p.a", "from p.a import x", "def f():\n    from p import a", "if TYPE_CHECKING:\n    from p.a import x"]
)
def test_the_graph_sees_every_kind_of_import(tmp_path: Path, import_: str) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p/__init__.py").write_text("")
    (tmp_path / "p/a.py").write_text("from p.b import y\n")
    (tmp_path / "p/b.py").write_text(import_)
    assert sorted(set(circle(graph_of(tmp_path)))) == ["p.a", "p.b"]
