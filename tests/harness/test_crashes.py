"""Repeated calls are counted over a run, and too many of them fail it."""

import subprocess
import sys
from pathlib import Path

import pytest

from harness.crashes import MOST, REPEATED
from harness.siblings import fast

CONFTEST = """
from harness import crashes


def pytest_configure(config):
    config.pluginmanager.register(crashes.Count())
"""
TEST = """
import warnings

import pytest


@pytest.mark.parametrize("number", range({tests}))
def test_that_passes(number):
    if number < {crashes}:
        warnings.warn(f"{words}: the call of test {{number}}", stacklevel=2)
"""


@pytest.mark.parametrize(
    ("crashes", "workers", "code"),
    fast((MOST + 1, 2, 1), of=[(0, 0, 0), (MOST, 2, 0), (MOST + 1, 2, 1), (MOST + 1, 0, 1)]),
)
def test_more_than_a_few_repeats_fail_a_run_whose_tests_pass(tmp_path: Path, crashes: int, workers: int, code: int) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TEST.format(tests=MOST + 2, crashes=crashes, words=REPEATED))
    paths = f"import sys; sys.path[:0] = [{str(Path(__file__).parents[1])!r}]; import pytest; "
    arguments = ["-q", "-n", str(workers), "-W", "default", "-p", "no:cacheprovider", str(tmp_path)]
    command = [sys.executable, "-c", f"{paths}sys.exit(pytest.main({arguments!r}))"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == code, done.stdout + done.stderr
    assert f"{MOST + 2} passed" in done.stdout
    assert (f"repeated after a crash: {crashes}" in done.stdout) == (crashes > 0)
