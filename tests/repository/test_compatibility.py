"""Programs of users keep working: every call that the newest release allowed is allowed today, or the changelog says otherwise.

The calls are made from the record of the release: each public name with its required arguments, and with all of them by position
and by name. Python binds them, and pyright checks them against the fronts. It also checks the examples of the fronts and the
folders of `examples/`, which use the names with real types.
"""

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from harness.fronts import FRONTS, RELEASED, ROOT, described, example_of

SOURCES = sorted(path for place in ("packages", "apps") for path in (ROOT / place).glob("*/src"))


class Call(NamedTuple):
    """The number of arguments by position, and the names of those by keyword."""

    positions: int
    keywords: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join(["given"] * self.positions + [f"{name}=given" for name in self.keywords])


def parsed(record: str) -> Iterator[tuple[str, str, str]]:
    """Yields (front, name, description) of each line of a record."""
    front = ""
    for line in record.splitlines():
        if line.startswith("["):
            front = line.strip("[]")
        elif line and not line.startswith("#"):
            (name,) = re.findall(r"^\w+", line)
            yield front, name, line.removeprefix(name)


def arguments_of(description: str) -> ast.arguments:
    (function,) = ast.parse(f"def f{description}: ...").body
    assert isinstance(function, ast.FunctionDef)
    return function.args


def calls_of(description: str) -> list[Call]:
    """Returns the calls that a signature allows: the required arguments, all by position, all by name."""
    args = arguments_of(description)
    places = [*args.posonlyargs, *args.args]
    required = len(places) - len(args.defaults)
    needed = tuple(item.arg for item, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if default is None)
    keywords = tuple(item.arg for item in args.kwonlyargs)
    first = len(args.posonlyargs)
    by_name = (*(item.arg for item in args.args), *keywords)
    return list(dict.fromkeys([Call(required, needed), Call(len(places), keywords), Call(first, by_name)]))


def defaults_of(description: str) -> dict[str, str]:
    """Returns the defaults of a signature by the name of the parameter, as text."""
    args = arguments_of(description)
    places = [*args.posonlyargs, *args.args]
    found = dict(zip([item.arg for item in places[len(places) - len(args.defaults) :]], args.defaults, strict=True))
    found |= {item.arg: value for item, value in zip(args.kwonlyargs, args.kw_defaults, strict=True) if value is not None}
    return {name: ast.unparse(value) for name, value in found.items()}


def difference(description: str, value: Any) -> str:
    """Returns how a name differs from its description in a release, for users of that release; empty if they need not know."""
    today = described(value)
    if not description.startswith("("):
        members = set(re.findall(r"\w+", description)) - set(re.findall(r"\w+", today))
        kind = description[:2] != today[:2] or (description.startswith(":") and description != today)
        return f"was {description or 'a class'}, is {today or 'a class'}" if kind or members else ""
    if not today.startswith("("):
        return f"had the signature {description}, now has none"
    for call in calls_of(description):
        try:
            signature(value).bind(*[None] * call.positions, **dict.fromkeys(call.keywords))
        except TypeError as error:
            return f"a call ({call}) fails: {error}"
    defaults = defaults_of(today)
    changed = [name for name, text in defaults_of(description).items() if defaults.get(name) != text]
    return f"other defaults of {', '.join(changed)}" if changed else ""


def differences(record: str, namespaces: Mapping[str, Any]) -> dict[str, str]:
    """Returns what users of a release have to know, by `front.name`."""
    found = {}
    for front, name, description in parsed(record):
        value = getattr(namespaces.get(front), name, None)
        if text := "is gone" if value is None else difference(description, value):
            found[f"{front}.{name}"] = text
    return found


def told(changelog: str) -> str:
    """Returns the sections Changed and Removed of the newest version in a changelog."""
    newest = re.split(r"^## ", changelog, flags=re.MULTILINE)[1]
    return "".join(re.findall(r"^### (?:Changed|Removed)\n(.*?)(?=^### |\Z)", newest, re.MULTILINE | re.DOTALL))


def untold(record: str, namespaces: Mapping[str, Any], changelog: str) -> list[str]:
    text = told(changelog)
    return [
        f"{name}: {what}"
        for name, what in differences(record, namespaces).items()
        if not re.search(rf"`[^`]*\b{name.rpartition('.')[2]}\b[^`]*`", text)
    ]


def test_what_changed_since_the_release_is_in_the_changelog() -> None:
    namespaces = {front: import_module(front) for front in FRONTS}
    missing = untold(RELEASED.read_text(), namespaces, (ROOT / "CHANGELOG.md").read_text())
    assert not missing, (
        "programs of users break, and CHANGELOG.md does not say so under Changed or Removed:\n"
        + "\n".join(missing)
        + "\nKeep the old call working, or write a line with the name in `code`"
    )


def test_the_stored_record_is_that_of_the_newest_release() -> None:
    versions = re.findall(r"^## (\d\S*)( \(unreleased\))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    released = [version for version, unreleased in versions if not unreleased]
    stored = RELEASED.read_text().splitlines()[0].removeprefix("# ")
    wanted = released[0] if released else f"before {versions[-1][0]}"
    assert stored == wanted, f"run `PYTHONPATH=tests python -m harness.fronts --release {wanted}` at the tag of the release"


RECORD = "# 1.0\n\n[front]\nkept(a, b=1, *, c, d=2)\n"
CHANGES = {
    "def kept(a, b=1, *, c, d=2): ...": "",
    "def kept(a, b=1, e=None, *, c, d=2, f=3): ...": "",
    "def kept(a, b=1, *rest, c, d=2, **more): ...": "",
    "def kept(a, b, *, c, d=2): ...": "missing a required argument: 'b'",
    "def kept(a, *, b=1, c, d=2): ...": "too many positional arguments",
    "def kept(first, b=1, *, c, d=2): ...": "missing a required argument: 'first'",
    "def kept(a, b=1, *, c, d=2, e): ...": "missing a required argument: 'e'",
    "def kept(a, b=1, *, c): ...": "unexpected keyword argument 'd'",
    "def kept(a, b=5, *, c, d=2): ...": "other defaults of b",
    "def kept(b=1, *, c, d=2, a=None): ...": "too many positional|multiple values|other|unexpected",
    "kept = 3": "now has none",
    "other = 3": "is gone",
}


@pytest.mark.parametrize("source", CHANGES)
def test_a_call_that_no_longer_works_is_found_and_may_be_told(source: str) -> None:
    namespace: dict[str, Any] = {}
    exec(source, namespace)  # noqa: S102 (the lines above)
    today = {"front": SimpleNamespace(**namespace)}
    found = differences(RECORD, today)
    if not CHANGES[source]:
        assert not found
        return
    assert list(found) == ["front.kept"] and re.search(CHANGES[source], found["front.kept"])
    silent = "# Changelog\n\n## 2.0 (unreleased)\n\n### Added\n\n- `kept`\n\n## 1.0\n\n### Removed\n\n- `kept`\n"
    assert untold(RECORD, today, silent)
    assert not untold(RECORD, today, silent.replace("### Added", "### Changed"))


def program(record: str, changed: set[str]) -> str:
    """Returns a program of the calls of a record, without those of names that the changelog tells about."""
    lines = ["from typing import Any", "", "given: Any = None", ""]
    for front, name, description in parsed(record):
        if f"{front}.{name}" in changed:
            continue
        lines.append(f"from {front} import {name} as used")
        lines += [f"used({call})" for call in calls_of(description)] if description.startswith("(") else ["print(used)"]
    return "\n".join(lines) + "\n"


def checked(folder: Path, files: Mapping[str, str]) -> list[str]:
    """Returns the errors of pyright in programs, whose imports are the sources of the distributions."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    own = [str(path) for path in folder.glob("examples/*/src")]
    settings = {"include": ["."], "extraPaths": [*own, *map(str, SOURCES)], "reportPrivateImportUsage": False}
    quiet = {"reportRedeclaration": False, "reportAbstractUsage": False}  # `used` is each name in turn
    (folder / "pyrightconfig.json").write_text(json.dumps({**settings, **quiet, "pythonVersion": "3.11"}))
    command = [str(Path(sys.executable).with_name("pyright")), "-p", str(folder), "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500, cwd=folder)
    found = json.loads(done.stdout)["generalDiagnostics"]
    errors = [item for item in found if item["severity"] == "error"]
    return [f"{Path(item['file']).name}:{item['range']['start']['line'] + 1}: {item['message']}" for item in errors]


@pytest.mark.slow
def test_programs_of_the_release_pass_a_type_checker(tmp_path: Path) -> None:
    namespaces = {front: import_module(front) for front in FRONTS}
    record = RELEASED.read_text()
    files = {"calls": program(record, set(differences(record, namespaces)))}
    files |= {front.replace(".", "_") + "_example": example_of(front) for front in FRONTS}
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("tests", "*.ipynb", "__pycache__"))
    errors = checked(tmp_path, files)
    assert not errors, "\n".join(errors)
