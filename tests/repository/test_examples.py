"""The folders of `examples/`: none is forgotten by its tests, by the list of examples, or among the groups of plugins."""

import re
import tomllib
from pathlib import Path

import pytest

from forge_core.registry import GROUPS

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(path for path in (ROOT / "examples").iterdir() if path.is_dir())
WHEELS = [path for path in FOLDERS if (path / "pyproject.toml").exists()]
TESTS = {folder.name: {path.name for path in folder.glob("tests/test_*.py")} for folder in FOLDERS}
PROJECTS = [tomllib.loads((path / "pyproject.toml").read_text()) for path in WHEELS]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_a_folder_is_a_small_repository_with_tests(folder: Path) -> None:
    assert (folder / "README.md").read_text().startswith("# ")
    if tests := TESTS[folder.name]:  # `nox -s isolation` runs them with what the folder declares
        declares = [name for name in ("pyproject.toml", "requirements.txt") if (folder / name).exists()]
        assert len(declares) == 1, f"{folder.name} has tests, and declares what they need in {declares}"
        others = {name for other, names in TESTS.items() if other != folder.name for name in names}
        assert not tests & others, "one process runs the tests of all folders"
    else:
        told = f'"examples" / "{folder.name}"'
        assert any(told in path.read_text() for path in (ROOT / "tests").rglob("test_*.py")), f"no test runs {folder.name}"


def test_nox_runs_every_folder_that_has_tests() -> None:
    source = (ROOT / "noxfile.py").read_text()
    assert 'EXAMPLES = tuple(sorted(path.parent for path in (ROOT / "examples").glob("*/tests")))' in source
    (isolation,) = re.findall(r"^def isolation\(.*?\n\n\n", source, re.MULTILINE | re.DOTALL)
    assert "EXAMPLES" in isolation


def test_the_list_of_examples_has_each_of_them_once_with_a_command() -> None:
    index = (ROOT / "examples" / "README.md").read_text()
    rows = re.findall(r"^\| \[([\w-]+)\]\(\1/README\.md\) \| [^|]+ \| `[^`]+` \|$", index, re.MULTILINE)
    assert sorted(rows) == [folder.name for folder in FOLDERS]


def test_every_group_of_entry_points_has_a_wheel_as_an_example() -> None:
    shown = {group for project in PROJECTS for group in project["project"]["entry-points"]}
    assert shown == GROUPS.keys()


@pytest.mark.parametrize("folder", WHEELS, ids=lambda path: path.name)
def test_a_wheel_is_complete(folder: Path) -> None:
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    module = folder / "src" / folder.name.replace("-", "_")
    assert project["name"] == folder.name and (module / "py.typed").exists() and (folder / "LICENSE").exists()
    assert project["license-files"] == ["LICENSE"] and "pytest>=8" in project["optional-dependencies"]["test"]
    needed = {name for name in project["dependencies"] if name.startswith("forge-")}
    source = "\n".join(path.read_text() for path in module.rglob("*.py"))
    imported = re.findall(r"^\s*(?:from|import) (forge_\w+)", source, re.MULTILINE)
    own = {module.name, "forge_testing"}  # what a check of a plugin uses comes with the checks
    assert {f"{name.replace('_', '-')}~=2.0" for name in set(imported) - own} == needed


def test_the_page_about_plugins_points_to_the_examples() -> None:
    page = (ROOT / "docs" / "writing-a-plugin.md").read_text()
    missing = [folder.name for folder in WHEELS if folder.name not in page]
    assert not missing, f"docs/writing-a-plugin.md does not mention {missing}"
