"""The shape that the repository keeps: versions, sizes of files, names, and what every component looks like."""

import ast
import dataclasses
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from forge_core.component import Component, fields_of
from forge_core.protocols.run import Hook
from forge_core.registry import GROUPS, Entry, Registry
from harness.tables import parts_of

ROOT = Path(__file__).parents[2]
PROJECTS = sorted(path.parent for folder in ("packages", "apps") for path in (ROOT / folder).glob("*/pyproject.toml"))
SOURCES = sorted(file for project in PROJECTS for file in (project / "src").rglob("*.py"))
LOOP = ROOT / "apps/forge-train/src/forge_train/run/loop.py"
LONG = 600


def project(path: Path) -> dict:
    return tomllib.loads((path / "pyproject.toml").read_text())["project"]


def entries() -> list[Entry]:
    """What the tables of this tree promise, whatever is installed."""
    return [
        Entry(group, name, project(path)["name"], project(path)["version"], target)
        for path in PROJECTS
        for group, parts in parts_of(path).items()
        for name, target in parts.items()
    ]


FOREIGN = ("lmms_eval.models",)
"""Groups in which other libraries look for parts."""


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.name)
def test_a_distribution_has_one_entry_point_which_names_its_table(path):
    """A literal, so that the registry reads it without importing anything else; groups and names occur once."""
    package = path.name.replace("-", "_")
    table = path / "src" / package / "parts.py"
    points = {"forge.parts": {path.name: f"{package}.parts:PARTS"}} if table.exists() else {}
    foreign = {name: group for name, group in project(path).get("entry-points", {}).items() if name in FOREIGN}
    assert project(path).get("entry-points", {}) == points | foreign
    if table.exists():
        docstring, statement = ast.parse(table.read_text()).body
        assert isinstance(docstring, ast.Expr) and isinstance(statement, ast.Assign)
        assert sum(len(parts) for parts in parts_of(path).values()) == table.read_text().count(f'": "{package}.')


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.name)
def test_versions_move_together(path):
    data = project(path)
    assert data["name"] == path.name
    assert data["version"] == "2.0.0"
    assert data["requires-python"] == ">=3.11"
    assert data["license"] == "MIT"
    for line in data["dependencies"]:
        if line.startswith("forge-"):
            assert line.endswith("~=2.0"), line
    package = path / "src" / path.name.replace("-", "_")
    assert (package / "py.typed").is_file()
    assert (path / "LICENSE").is_file()


def test_there_is_one_console_script():
    scripts = {path.name: project(path).get("scripts", {}) for path in PROJECTS}
    assert {name: list(found) for name, found in scripts.items() if found} in ({}, {"forge-train": ["forge-train"]})


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: f"{entry.group}:{entry.name}")
def test_every_part_loads_and_conforms(entry):
    assert entry.group in GROUPS, f"{entry.group} is no group of Forge"
    if entry.group == "forge.presets":
        return
    loaded = Registry([entry]).load_entry(entry)
    if GROUPS[entry.group].build is not None:
        assert loaded.__dataclass_params__.frozen != issubclass(loaded, Hook), "hooks change, and nothing else"
        assert all(field.kw_only for field in dataclasses.fields(loaded))
        assert (loaded.__doc__ or "").strip()
        assert [info.name for info in fields_of(loaded) if not info.doc] == []


def test_presets_are_files():
    for entry in entries():
        if entry.group == "forge.presets":
            loaded = Registry([entry]).load_entry(entry)
            assert Path(str(loaded() if callable(loaded) else loaded)).is_file(), entry.target


def test_every_component_of_the_sources_is_frozen_documented_and_keyword_only():
    """Also those that no table names, such as nested sections."""
    seen = 0
    for file in SOURCES:
        if "components" not in file.with_suffix("").parts:
            continue
        name = ".".join(file.with_suffix("").parts[file.parts.index("src") + 1 :]).removesuffix(".__init__")
        for thing in vars(import_module(name)).values():
            if isinstance(thing, type) and issubclass(thing, Component) and thing.__module__ == name:
                assert dataclasses.is_dataclass(thing), f"{name}.{thing.__name__} is no dataclass"
                assert thing.__dataclass_params__.frozen  # type: ignore[attr-defined]
                assert all(field.kw_only for field in dataclasses.fields(thing)), f"{name}.{thing.__name__}"
                assert [info.name for info in fields_of(thing) if not info.doc] == [], (
                    f"{name}.{thing.__name__}: fields without docs"
                )
                seen += 1
    assert seen >= 5


def test_no_build_only_imports_a_class_and_passes_its_fields():
    """Such a component sets `implementation` instead."""
    found = set()
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name == "build" and forwards(node):
                found.add(str(file.relative_to(src_of(file))))
    assert not found


def forwards(build: ast.FunctionDef) -> bool:
    """Whether a method imports one thing and returns it, called with its own parameters and with fields under their names."""
    if not (len(build.body) == 2 and isinstance(build.body[0], ast.ImportFrom) and isinstance(build.body[1], ast.Return)):
        return False
    call = build.body[1].value
    own = {f"self.{keyword.arg}" for keyword in call.keywords} if isinstance(call, ast.Call) else set()
    given = {ast.unparse(keyword.value) for keyword in call.keywords} if isinstance(call, ast.Call) else set()
    return isinstance(call, ast.Call) and all(isinstance(item, ast.Name) for item in call.args) and given == own


def test_no_file_is_long_without_a_reason():
    """The reason stands in the module's docstring as a sentence with the word "long"."""
    for file in (*SOURCES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py"), ROOT / "noxfile.py"):
        lines = file.read_text().splitlines()
        assert len(lines) <= LONG or "long" in "\n".join(lines[:12]), f"{file.relative_to(ROOT)} has {len(lines)} lines"


SHORT: frozenset[str] = frozenset()
"""Files of at most 60 lines that only one neighbor imports, and why not."""

REPEATED = frozenset({"Linear"})
"""Public class names that have several meanings today. Remove a name here when it has one; none may be added."""


def test_no_short_file_has_a_single_neighbor_that_imports_it():
    modules = {".".join(file.relative_to(src_of(file)).with_suffix("").parts): file for file in SOURCES}
    importers: dict[str, set[str]] = {name: set() for name in modules}
    for name, file in modules.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                for one in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                    importers.get(one, set()).add(name)
    found = set()
    for name, file in modules.items():
        others = {one for one in importers[name] if modules[one].name != "__init__.py"} - {name}
        short = file.name not in ("__init__.py", "__main__.py") and len(file.read_text().splitlines()) <= 60
        if short and len(others) == 1 and modules[others.pop()].parent == file.parent:
            found.add(str(file.relative_to(src_of(file))))
    assert found == SHORT, "merge the file with its neighbor"


@pytest.mark.slow  # trains eight steps
def test_a_step_on_a_cpu_passes_through_at_most_36_files():
    script = Path(__file__).with_name("files_of_a_step.py")
    printed = subprocess.run((sys.executable, script), capture_output=True, text=True, check=True).stdout
    count = re.search(r"^(\d+) files take part in one step:$", printed, re.MULTILINE)
    assert count and int(count[1]) <= 36, printed


def is_protocol_with_its_class(files: list[str]) -> bool:
    """A protocol of forge_core and the one class that has its name share their meaning."""
    return len(files) == 2 and sum(file.startswith("forge_core/protocols/") for file in files) == 1


def test_a_public_class_name_has_one_meaning():
    places: dict[str, list[str]] = {}
    for file in SOURCES:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(file.relative_to(src_of(file))))
    repeated = {name: files for name, files in places.items() if len(files) > 1 and not is_protocol_with_its_class(files)}
    assert set(repeated) == REPEATED, {name: repeated.get(name) for name in set(repeated) ^ REPEATED}


def test_the_files_of_the_newcomers_test_exist():
    page = (ROOT / "docs/adr/0038-one-concept-is-one-file.md").read_text()
    files = re.findall(r"^\| .* \| `(\S+)` \|$", page, re.MULTILINE)
    known = {str(file.relative_to(src_of(file))) for file in SOURCES}
    assert len(files) == 20 and not set(files) - known


def src_of(file: Path) -> Path:
    """The folder `src` that a source is in."""
    return next(parent for parent in file.parents if parent.name == "src")


def test_files_are_flushed_in_one_module():
    """`forge_core.files` writes, flushes and renames; the checkpoint store works on open directories instead."""
    flush = {str(file.relative_to(ROOT)) for file in SOURCES if "fsync(" in file.read_text()}
    assert flush == {
        "packages/forge-core/src/forge_core/files.py",
        "packages/forge-ckpt/src/forge_ckpt/store/local.py",
    }


def test_no_room_is_called_utils():
    banned = {"utils.py", "util.py", "helpers.py", "misc.py", "common.py"}
    assert [file for file in SOURCES if file.name in banned] == []


def names_in(file: Path) -> set[str]:
    """Identifiers, and their words: `tp_size` counts as `tp`."""
    tokens = tokenize.generate_tokens(io.StringIO(file.read_text()).readline)
    names = {token.string.lower() for token in tokens if token.type == tokenize.NAME}
    return names | {word for name in names for word in name.split("_")}


@pytest.mark.skipif(not LOOP.exists(), reason="there is no loop yet")
def test_the_loop_knows_no_strategy():
    assert len(LOOP.read_text().splitlines()) < 160  # with the rollback
    assert names_in(LOOP) & {"pp", "tp", "fsdp", "moe", "vlm", "isinstance"} == set()
