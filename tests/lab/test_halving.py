"""Successive halving: the best of each rung go on, the same ones every time."""

import math
from pathlib import Path
from typing import Any

import pytest

from forge_lab.sweep.execution import StopRequests, survivors
from forge_lab.sweep.files import write_recipes
from forge_lab.sweep.points import Point, Search
from forge_lab.sweep.results import collect_results
from lab.fake_runs import FakeRuns, run_all, sweep_of

GRID = """
recipe = "debug"
[vary]
optimizer.lr = [1e-3, 2e-3, 3e-3, 4e-3, 5e-3, 6e-3]
[search]
kind = "halving"
rungs = [5, 12]
keep = 0.5
"""


def points(*values: Any) -> tuple[list[Point], dict[str, Any]]:
    made = [Point(f"p{index}", {}, "") for index in range(len(values))]
    return made, {point.name: value for point, value in zip(made, values, strict=True)}


@pytest.mark.parametrize(
    ("values", "keep", "mode", "kept"),
    [
        ((3.0, 1.0, 2.0, 4.0), 0.5, "min", "p1 p2"),
        ((3.0, 1.0, 2.0, 4.0), 0.5, "max", "p0 p3"),
        ((1.0, 1.0, 1.0, 1.0), 0.5, "min", "p0 p1"),
        ((None, 2.0, None, 1.0), 0.75, "min", "p1 p3"),
        ((None, None), 0.5, "min", ""),
        ((5.0, 4.0, 3.0), 0.1, "min", "p2"),
        (tuple(range(9)), 0.3333, "min", "p0 p1 p2"),
        (tuple(range(5)), 0.5, "min", "p0 p1 p2"),
    ],
)
def test_who_goes_on(values: tuple, keep: float, mode: Any, kept: str) -> None:
    made, found = points(*values)
    search = Search(kind="halving", keep=keep, mode=mode)
    assert " ".join(point.name for point in survivors(made, found, search)) == kept


def rises(job: Any, step: int) -> float:
    """Better with a larger rate, and with more steps."""
    return 10 - 1000 * job.optimizer.lr - step / 100


def test_the_best_of_each_rung_go_on_to_their_end(tmp_path: Path) -> None:
    made = sweep_of(tmp_path, GRID)
    write_recipes(made)
    runs = FakeRuns(rises)
    found, said = run_all(made, runs, 2)
    expected = [(f"lr=0.00{lr}", "5") for lr in range(1, 7)] + [(f"lr=0.00{lr}", "12") for lr in (4, 5, 6)]
    assert runs.started == expected + [("lr=0.005", ""), ("lr=0.006", "")]
    assert {name: (one.status, one.step) for name, one in found.items()} == {
        **{f"lr=0.00{lr}": ("paused", 5) for lr in (1, 2, 3)},
        "lr=0.004": ("paused", 12),
        "lr=0.005": ("finished", 30),
        "lr=0.006": ("finished", 30),
    }
    assert "after step 5: 3 of 6 points continue" in said and "after step 12: 2 of 3 points continue" in said
    assert [item.point.name[-1] for item in collect_results(made).results] == ["6", "5", "4", "3", "2", "1"]
    again = FakeRuns(rises)
    run_all(made, again)
    assert again.commands == []


def test_a_run_that_fails_or_diverges_does_not_go_on(tmp_path: Path) -> None:
    made = sweep_of(tmp_path, GRID)
    write_recipes(made)

    def loss(job: Any, step: int) -> float:
        return math.nan if job.optimizer.lr == 5e-3 else rises(job, step)

    found, _ = run_all(made, FakeRuns(loss, codes={"lr=0.006": [1, 1]}))
    assert (found["lr=0.006"].status, found["lr=0.005"].status) == ("failed", "diverged")
    assert [name for name, one in found.items() if one.status == "finished"] == ["lr=0.003", "lr=0.004"]
    again = FakeRuns(loss)
    found, _ = run_all(made, again)
    assert again.started[:1] == [("lr=0.006", "5")], "a failure is worth a try, and what it gives counts then"
    assert found["lr=0.006"].status == "finished"


def test_a_sweep_that_was_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    made = sweep_of(tmp_path, GRID)
    write_recipes(made)
    asked = StopRequests()

    def during(runs: FakeRuns) -> None:
        asked.times = int(len(runs.commands) == 8)

    run_all(made, FakeRuns(rises, looks=3, during=during), 1, asked)
    runs = FakeRuns(rises)
    found, _ = run_all(made, runs)
    assert runs.started == [("lr=0.005", "12"), ("lr=0.006", "12"), ("lr=0.005", ""), ("lr=0.006", "")]
    assert [one.status for one in found.values()].count("finished") == 2
