"""Who may import whom: the dependency rule of the repository, by a walk over every import statement."""

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge_core.registry import GROUPS
from harness.tables import parts_of

ROOT = Path(__file__).parents[2]
PROJECTS = {
    path.parent.name.replace("-", "_"): path.parent
    for folder in ("packages", "apps")
    for path in ROOT.glob(f"{folder}/*/pyproject.toml")
}
MIDDLE = {"forge_parallel", "forge_models", "forge_data", "forge_ckpt"}
PROVIDES = {"yaml": "pyyaml", "PIL": "pillow", "sklearn": "scikit-learn"}
"""Import names that differ from the name of their distribution by more than a dash."""
HEAVY = ("torch", "numpy", "transformers", "tokenizers", "datasets", "torchao", "matplotlib", "safetensors")


READ_RECIPES = {"forge_train/recipe/checks.py", "forge_train/recipe/schema.py", "forge_train/commands/run.py"}
"""Files of forge_train, forge_core and forge_ckpt that know what a recipe says."""


@pytest.mark.parametrize("package", ["forge_core", "forge_ckpt", "forge_train"])
def test_an_implementation_does_not_know_its_component(package: str) -> None:
    """Imports inside of functions and for types count as well."""
    folder = PROJECTS[package] / "src"
    for file in folder.rglob("*.py"):
        path = str(file.relative_to(folder))
        if "components" in file.parts or path in READ_RECIPES:
            continue
        modules = [item.module or "" for item in ast.walk(ast.parse(file.read_text())) if isinstance(item, ast.ImportFrom)]
        assert [name for name in modules if name.startswith("forge_") and ".components" in name] == [], path


def sources() -> list[Path]:
    return sorted(file for project in PROJECTS.values() for file in (project / "src").rglob("*.py"))


def package_of(file: Path) -> str:
    return file.relative_to(ROOT).parts[3]


def metadata(package: str) -> dict:
    return tomllib.loads((PROJECTS[package] / "pyproject.toml").read_text())["project"]


def normal(requirement: str) -> str:
    name = requirement
    for stop in "[ ~=<>!;@(":
        name = name.split(stop)[0]
    return name.strip().lower().replace("_", "-")


def declared(package: str) -> set[str]:
    """Distributions that a package may import: what it requires, and what its extras do."""
    extras = metadata(package).get("optional-dependencies", {}).values()
    return required(package) | {normal(line) for extra in extras for line in extra}


def required(package: str) -> set[str]:
    """Distributions that come with a package, whatever its extras."""
    return {normal(line) for line in metadata(package)["dependencies"]}


def imports(tree: ast.AST, typing_too: bool = True) -> Iterator[tuple[int, str]]:
    """(line, module) of every import statement; without `typing_too`, those that happen at run time."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write the import in full"
            assert node.module is not None
            yield node.lineno, node.module
        elif not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING") or typing_too:
            yield from imports(node, typing_too)
        else:
            yield from (found for other in node.orelse for found in imports(ast.Module([other], []), typing_too))


def undeclared(package: str, tree: ast.AST) -> list[str]:
    """Imports of what a package does not declare. forge_core may name torch and numpy for types, and never have them."""
    found = []
    for line, module in imports(tree, typing_too=package != "forge_core"):
        top = module.split(".")[0]
        distribution = PROVIDES.get(top, top.lower().replace("_", "-"))
        if top not in sys.stdlib_module_names and top != package and distribution not in declared(package):
            found.append(f"line {line}: {module}")
    return found


def test_the_walk_sees_the_ten_packages():
    assert set(PROJECTS) == {"forge_core", *MIDDLE, "forge_vlm", "forge_interp", "forge_train", "forge_lab", "forge_testing"}
    assert len(sources()) > 20


@pytest.mark.parametrize("package", PROJECTS)
def test_a_package_imports_what_it_declares_and_nothing_else(package):
    faults = {
        str(file.relative_to(ROOT)): found
        for file in sources()
        if package_of(file) == package and (found := undeclared(package, ast.parse(file.read_text())))
    }
    assert not faults


def test_the_walk_finds_what_it_should():
    assert undeclared("forge_core", ast.parse("def f():\n    import torch.nn\n")) == ["line 2: torch.nn"]
    assert undeclared("forge_data", ast.parse("from forge_models import decoder")) == ["line 1: forge_models"]
    assert undeclared("forge_data", ast.parse("import json, torch\nfrom forge_core.batch import Batch")) == []
    guarded = "if TYPE_CHECKING:\n    import torch\nelse:\n    import numpy"
    assert undeclared("forge_core", ast.parse(guarded)) == ["line 4: numpy"]
    assert undeclared("forge_ckpt", ast.parse("if TYPE_CHECKING:\n    import forge_models")) == ["line 2: forge_models"]


def test_the_packages_depend_on_each_other_as_designed():
    siblings = {package: {name.replace("-", "_") for name in declared(package)} & set(PROJECTS) for package in PROJECTS}
    assert siblings["forge_core"] == set()
    for package in MIDDLE:
        assert siblings[package] <= {"forge_core"}
    assert siblings["forge_vlm"] <= {"forge_core", "forge_models", "forge_data"}
    assert {name.replace("-", "_") for name in required("forge_interp")} & set(PROJECTS) == {"forge_core", "forge_models"}
    assert not {"forge_interp", "forge_lab"} & siblings["forge_train"]
    assert not any({"forge_lab", "forge_testing"} & others for others in siblings.values())
    assert {normal(line) for line in metadata("forge_testing")["dependencies"]} == {"forge-core"}
    assert "forge_interp" not in siblings["forge_lab"]


def test_only_the_commands_of_forge_interp_import_the_trainer():
    """The front names what is there, and imports it on use."""
    folder = PROJECTS["forge_interp"] / "src" / "forge_interp"
    extra = {normal(line) for line in metadata("forge_interp")["optional-dependencies"]["train"]}
    faults = {
        str(file.relative_to(folder)): found
        for file in folder.rglob("*.py")
        if "commands" not in file.parts
        and (found := [name for _, name in imports(ast.parse(file.read_text())) if normal(name.split(".")[0]) in extra])
    }
    assert extra >= {"forge-train", "forge-parallel"} and not faults


PROBE = """
import importlib, json, sys
for name in sys.argv[1].split(","):
    importlib.import_module(name)
    print(json.dumps([name, sorted(set(sys.modules) & set(sys.argv[2].split(",")))]))
"""


def chosen_by_name() -> set[str]:
    """Modules behind the parts of groups whose components a recipe chooses; a command or a check may need more."""
    return {
        target.partition(":")[0]
        for project in PROJECTS.values()
        for group, offered in parts_of(project).items()
        if GROUPS[group].build is not None
        for target in offered.values()
    }


def test_components_and_core_import_without_torch():
    """In one process, so that it costs one interpreter; the first module that brings something heavy is named."""
    names = [
        ".".join(file.relative_to(project / "src").with_suffix("").parts).removesuffix(".__init__")
        for package, project in PROJECTS.items()
        for file in sorted((project / "src").rglob("*.py"))
        if (package == "forge_core" or "components" in file.parts or file.name == "__init__.py") and file.name != "__main__.py"
    ]
    assert any(name.startswith("forge_models.components.") for name in names)
    assert "forge_parallel.transforms.tensor.transform" in chosen_by_name()
    names += sorted(chosen_by_name() - set(names))
    done = subprocess.run(
        [sys.executable, "-c", PROBE, ",".join(names), ",".join(HEAVY)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    reported = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reported) == len(names)
    assert next((line for line in reported if line[1]), None) is None
