"""`train.stop_at` ends a start, not the run: the schedule is that of the whole run, and what goes on is what never paused."""

from pathlib import Path

import pytest

from forge_parallel.launch.environment import Launch
from forge_train.commands.run import run_recipe
from forge_train.process.logs import logging_of
from forge_train.trackers import METRICS, read_metrics
from train.runs import TINY, train

HOOKS = """
[[hooks]]
name = "log"
every = 100

[[hooks]]
name = "evaluate"
every = 100

[[hooks]]
name = "save"

[data.evaluation.held_out]
name = "random"
vocab_size = 61
tokens = 400
document = 23
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY.replace('[[hooks]]\nname = "save"\n', HOOKS))
    return path


def test_a_run_in_three_parts_is_the_run_in_one(recipe: Path, tmp_path: Path) -> None:
    whole = train(recipe, [f"--job.dir={tmp_path / 'whole'}"])
    parts = [f"--job.dir={tmp_path / 'parts'}", "--checkpoint.every=0"]
    first = train(recipe, [*parts, "--train.stop_at=3"])
    second = train(recipe, [*parts, "--train.stop_at=5"])
    again = train(recipe, [*parts, "--train.stop_at=5"])
    third = train(recipe, parts)
    assert [part["step"] for part in (first, second, again, third)] == [3, 5, 5, 8]
    assert first["reason"] == "paused (train.stop_at = 3)" and again["losses"] == []
    assert first["losses"] + second["losses"] + third["losses"] == whole["losses"]
    assert third["weights"] == whole["weights"] != second["weights"]
    entries = [
        {entry["step"]: entry for entry in read_metrics(tmp_path / name / METRICS) if "evaluation/held_out/loss" in entry}
        for name in ("whole", "parts")
    ]
    assert list(entries[1]) == [3, 5, 8] and list(entries[0]) == [8], "a pause is evaluated"
    assert entries[0][8]["evaluation/held_out/loss"] == entries[1][8]["evaluation/held_out/loss"]
    logged = {entry["step"] for entry in read_metrics(tmp_path / "parts" / METRICS) if "grad_norm" in entry}
    assert {3, 5, 8} <= logged, "and logged"


@pytest.mark.slow
def test_a_step_behind_the_end_is_the_end(recipe: Path, tmp_path: Path) -> None:
    assert train(recipe, [f"--job.dir={tmp_path / 'a'}", "--train.stop_at=9"])["reason"] == "finished"
    assert train(recipe, [f"--job.dir={tmp_path / 'b'}", "--train.stop_at=8"])["reason"] == "finished"


def test_a_pause_is_no_failure(recipe: Path, tmp_path: Path) -> None:
    with logging_of(0, 1) as log:
        assert run_recipe(str(recipe), [f"--job.dir={tmp_path / 'a'}", "--train.stop_at=2"], False, Launch(), log) == 0
    assert "paused (train.stop_at = 2)" in (tmp_path / "a" / "report.html").read_text()
