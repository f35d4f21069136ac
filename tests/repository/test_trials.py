"""The comparison with other frameworks: the page shows the stored results, each has every trial, and ours still hold."""

import ast
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRIALS = ROOT / "benchmarks" / "trials"


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> tuple:
    for folder in (TRIALS, ROOT / "docs" / "_ext"):
        monkeypatch.syspath_prepend(str(folder))
    return import_module("trials"), import_module("trials_table")


def test_the_page_shows_the_stored_results(modules: tuple) -> None:
    trials, table = modules
    assert table.PAGE.read_text() == table.page(trials.TRIALS), "run `python docs/_ext/trials_table.py`"
    stored = json.loads(table.RESULTS.read_text())["trials"]
    assert set(stored) == set(trials.TRIALS) and all(set(row) == set(trials.FRAMEWORKS) for row in stored.values())
    assert all(result["outcome"] in trials.OUTCOMES and result["seen"] for row in stored.values() for result in row.values())


@pytest.mark.parametrize("framework", ["forge", "torchtitan", "transformers", "kempnerforge"])
def test_every_framework_has_every_trial(modules: tuple, framework: str) -> None:
    body = ast.parse((TRIALS / f"of_{framework}.py").read_text()).body
    assert set(modules[0].TRIALS) <= {item.name for item in body if isinstance(item, ast.FunctionDef)}


@pytest.mark.slow
def test_ours_are_what_is_stored(modules: tuple, tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    words = [sys.executable, str(TRIALS / "trials.py"), "--frameworks", "forge,transformers", "--out", str(out)]
    subprocess.run(words, check=True, capture_output=True, timeout=600)
    stored = json.loads(modules[1].RESULTS.read_text())["trials"]
    for trial, row in json.loads(out.read_text())["trials"].items():
        assert row["forge"]["outcome"] == stored[trial]["forge"]["outcome"] != "wrong", row
