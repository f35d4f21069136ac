"""The steps of these tests can be imported by the processes that run them."""

import os
from pathlib import Path

import pytest

STEPS = "train.doctor.steps_of_tests"


@pytest.fixture(autouse=True)
def path_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
