"""What is released: wheels and sdists that are the same bytes wherever they are built; what CI runs; what reports ask for."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECTS = sorted(path.parent for place in ("packages", "apps") for path in ROOT.glob(f"{place}/*/pyproject.toml"))
BUILD = """
import sys
from hatchling.build import build_sdist, build_wheel
build_sdist(sys.argv[1])
build_wheel(sys.argv[1])
"""


def built(project: Path, folder: Path, modified: int, umask: int) -> dict[str, bytes]:
    """Wheel and sdist of a copy of a project, whose files have other times and permissions than in the repository."""
    copy, out = folder / "at" / str(modified) / project.name, folder / f"dist-{modified}"
    shutil.copytree(
        project, copy, ignore=shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info"), copy_function=shutil.copyfile
    )
    for path in copy.rglob("*"):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
        os.utime(path, (modified, modified))
    out.mkdir()
    date = {"SOURCE_DATE_EPOCH": "1700000000"}  # as a release sets it, to the time of its commit
    subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=copy, env={**os.environ, **date}, check=True, capture_output=True)
    return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.mark.parametrize(
    "project",
    [pytest.param(path, marks=() if path.name == "forge-core" else pytest.mark.slow, id=path.name) for path in PROJECTS],
)
def test_two_builds_are_the_same_bytes(project: Path, tmp_path: Path) -> None:
    first, second = built(project, tmp_path, 1_600_000_000, 0o022), built(project, tmp_path, 1_700_000_001, 0o077)
    assert first == second and sorted(name.rpartition(".")[2] for name in first) == ["gz", "whl"]
    (wheel,), (sdist,) = tmp_path.glob("dist-1600000000/*.whl"), tmp_path.glob("dist-1600000000/*.tar.gz")
    with tarfile.open(sdist) as archive:
        prefix = sdist.name.removesuffix(".tar.gz")
        members = set(archive.getnames())
        assert {f"{prefix}/{name}" for name in ("README.md", "LICENSE", "pyproject.toml", "PKG-INFO")} <= members
        archive.extractall(tmp_path / "sdist", filter="data")
    with zipfile.ZipFile(wheel) as archive:
        modules = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("METADATA"))
    files = {str(path.relative_to(project / "src")) for path in (project / "src").rglob("*") if path.is_file()}
    assert modules == {name for name in files if "__pycache__" not in name and ".egg-info" not in name}, "no file is missing"
    assert (project / "README.md").read_text() in metadata, "a package index shows the README"
    again = built(tmp_path / "sdist" / prefix, tmp_path / "again", 1_650_000_000, 0o022)
    assert again[wheel.name] == first[wheel.name], "the sdist builds the same wheel"


def test_all_distributions_have_the_version_of_the_changelog() -> None:
    versions = {tomllib.loads((project / "pyproject.toml").read_text())["project"]["version"] for project in PROJECTS}
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest and versions == {newest[1]}


def test_ci_runs_what_has_to_pass_on_the_oldest_python() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}, "code of a pull request cannot write"
    (job,) = workflow["jobs"].values()
    (python,) = (step["with"]["python-version"] for step in job["steps"] if "setup-python" in step.get("uses", ""))
    oldest = {tomllib.loads((project / "pyproject.toml").read_text())["project"]["requires-python"] for project in PROJECTS}
    assert oldest == {f">={python}"}
    assert any(step.get("run", "").endswith("bash .ci/run") for step in job["steps"]) and (ROOT / ".ci" / "run").is_file()


def test_the_oldest_releases_that_are_tried_are_what_the_distributions_admit() -> None:
    noxfile = (ROOT / "noxfile.py").read_text()
    oldest = re.search(r'^TORCHES = \("([\d.]+)".*^TRANSFORMERS = "([\d.]+)"', noxfile, re.MULTILINE | re.DOTALL)
    admitted: dict[str, set[str]] = {"torch": set(), "transformers": set()}
    for project in PROJECTS:
        content = tomllib.loads((project / "pyproject.toml").read_text())["project"]
        for requirements in (content["dependencies"], *content.get("optional-dependencies", {}).values()):
            for requirement in requirements:
                if found := re.fullmatch(r"(torch|transformers)>=([\d.]+)(,<[\d.]+)?", requirement):
                    admitted[found[1]].add(found[2])
    assert oldest and admitted == {"torch": {oldest[1]}, "transformers": {oldest[2]}}


def test_every_report_of_a_problem_has_the_state_of_the_machine() -> None:
    templates = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert len(templates) >= 2
    for path in templates:
        form = yaml.safe_load(path.read_text())
        assert {"name", "description", "body"} <= form.keys(), path
        asked = {item["id"]: item for item in form["body"]}
        assert "forge-train doctor --json" in asked["doctor"]["attributes"]["label"]
        assert asked["doctor"]["validations"]["required"] is True
