"""Goodput of records whose times are known: every second has one cause, and the causes are those of the made-up clock."""

import json
import random
from pathlib import Path

import pytest

from forge_train.runs.goodput import CAUSES, Goodput
from forge_train.runs.overview import overview
from train.many_runs.records import EPOCH, append, begin, end, first_start, log, second_start


def goodput_of(run: Path) -> Goodput | None:
    return overview(run, EPOCH + 10_000).goodput


def lost(**seconds: float) -> dict[str, float]:
    named = {"start-up": "start_up", "repeated steps": "repeated", "other hooks": "hooks"}
    return {cause: pytest.approx(seconds.get(named.get(cause, cause), 0.0), abs=2e-3) for cause in CAUSES}


def test_one_start_that_was_killed(tmp_path: Path) -> None:
    """It ends at its newest line, 101; 18 s are not steps: 12 s until the first one, and 6 s of compilation."""
    first_start(tmp_path)
    found = goodput_of(tmp_path)
    assert found is not None
    assert found.lost == lost(start_up=18, checkpoints=9, evaluation=4)
    assert (found.wall, found.steps) == (pytest.approx(101), pytest.approx(70))
    assert found.share == pytest.approx(70 / 101)


def test_a_run_that_was_killed_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Steps 31 to 35 are trained twice: 10 s. 49 s lie between the newest line and the next process."""
    first_start(tmp_path)
    second_start(tmp_path)
    found = goodput_of(tmp_path)
    assert found is not None
    assert found.lost == lost(start_up=18 + 9, repeated=10, checkpoints=9 + 3, evaluation=4 + 4, down=49)
    assert (found.wall, found.steps) == (pytest.approx(186), pytest.approx(60 + 20))


def test_a_step_between_two_lines_is_placed_in_proportion(tmp_path: Path) -> None:
    """The save after step 30 lies between the lines of steps 30 and 35, and is no part of the proportion."""
    first_start(tmp_path)
    second_start(tmp_path, 32)
    found = goodput_of(tmp_path)
    assert found is not None and found.lost["repeated steps"] == pytest.approx(6) and found.steps == pytest.approx(64 + 16)


def test_a_step_before_the_first_line_is_placed_too(tmp_path: Path) -> None:
    """Without a line of its first step: the first line is that of step 5, at 10 + 5 * 2."""
    begin(tmp_path, "a", 0, 10)
    for step in (5, 10):
        log(tmp_path, step, 10 + step * 2)
    begin(tmp_path, "b", 40, 45, 3)
    end(tmp_path, "b", 50, 3, 75)
    found = goodput_of(tmp_path)
    assert found is not None and found.steps == pytest.approx(6) and found.lost["repeated steps"] == pytest.approx(14)


def test_a_later_start_may_go_back_before_an_earlier_one(tmp_path: Path) -> None:
    """The checkpoint of step 30 was damaged: the third start goes on from step 10, and the second one counts for nothing."""
    first_start(tmp_path)
    second_start(tmp_path, code=1, status="an error")
    second_start(tmp_path, 10, 200, "c")
    found = goodput_of(tmp_path)
    assert found is not None
    assert found.steps == pytest.approx(20 + 60)
    assert found.lost["repeated steps"] == pytest.approx(50 + 20)
    assert found.lost["down"] == pytest.approx(49 + 200 - 186)


def test_a_start_that_is_killed_before_its_first_line_is_down_time(tmp_path: Path) -> None:
    first_start(tmp_path)
    begin(tmp_path, "x", 110, 115, 30)
    second_start(tmp_path)
    found = goodput_of(tmp_path)
    assert found is not None
    assert found.lost["start-up"] == pytest.approx(18 + 5 + 9) and found.lost["down"] == pytest.approx(9 + 35)


def test_time_after_a_run_that_ended_by_itself_is_not_lost(tmp_path: Path) -> None:
    first_start(tmp_path)
    end(tmp_path, "a", 101, 35, 0, "paused (train.stop_at = 35)", save=9.0, evaluate=4.0)
    second_start(tmp_path, 35, 9000)
    found = goodput_of(tmp_path)
    assert found is not None and found.lost["down"] == 0 and found.lost["repeated steps"] == 0
    assert found.wall == pytest.approx(101 + 5 + 4 + 10 + 7) and found.steps == pytest.approx(70 + 10)


def test_time_after_a_preempted_run_is_lost(tmp_path: Path) -> None:
    first_start(tmp_path)
    end(tmp_path, "a", 104, 35, 75, "asked to stop", save=12.0, evaluate=4.0)
    second_start(tmp_path, 35, 9000)
    found = goodput_of(tmp_path)
    assert found is not None and found.lost["down"] == pytest.approx(9000 - 104) and found.lost["checkpoints"] == 15


def test_a_rollback_has_no_down_time(tmp_path: Path) -> None:
    """It goes back within its process, 6 s after its newest line and 3 s after it was decided: 3 s of start-up."""
    first_start(tmp_path)
    end(tmp_path, "a", 104, 35, None, "rolled back", save=9.0, evaluate=4.0)
    begin(tmp_path, "b", 0, 107, 30, rollback=True)
    log(tmp_path, 31, 109)
    run = overview(tmp_path, EPOCH + 110)
    assert run.goodput is not None and (run.restarts, run.rollbacks) == (0, 1)
    assert run.goodput.lost == lost(start_up=18 + 3, repeated=13, checkpoints=9, evaluation=4)
    assert run.goodput.wall == pytest.approx(109) and run.goodput.steps == pytest.approx(62)


def test_pauses_of_other_hooks(tmp_path: Path) -> None:
    begin(tmp_path, "a", 0, 10)
    log(tmp_path, 1, 12)
    log(tmp_path, 5, 40, sample=20.0)
    found = goodput_of(tmp_path)
    assert found is not None and found.lost == lost(start_up=10, hooks=20) and found.steps == pytest.approx(10)


def test_what_is_not_recorded_is_unknown(tmp_path: Path) -> None:
    begin(tmp_path / "no begin", "a", None, 10)
    log(tmp_path / "no begin", 1, 12)
    begin(tmp_path / "no line", "a", 0, 10)
    append(tmp_path / "older" / "metrics.jsonl", {"step": 1, "time": "2026-03-01T08:00:00.000+00:00", "loss": 1.0})
    for name in ("no begin", "no line", "older"):
        assert goodput_of(tmp_path / name) is None, name


def test_metrics_that_were_cut_are_told(tmp_path: Path) -> None:
    first_start(tmp_path)
    second_start(tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:3]))
    run = overview(tmp_path, EPOCH + 200)
    assert run.goodput is None and run.notes == ["metrics.jsonl is shorter than it was at the last start"]


@pytest.mark.parametrize("seed", range(40))
def test_every_second_has_one_cause(tmp_path: Path, seed: int) -> None:
    """Also where starts overlap, clocks differ and steps are out of order."""
    chance = random.Random(seed)
    now = 0.0
    for number in range(chance.randint(1, 6)):
        began = now + chance.uniform(-20, 40)
        now = began + chance.uniform(-5, 10)
        step = chance.randint(0, 30)
        begin(tmp_path, str(number), began, now, step)
        waited = 0.0
        for _ in range(chance.randint(0, 5)):
            step, now, waited = step + chance.randint(0, 9), now + chance.uniform(0, 30), waited + chance.uniform(0, 12)
            log(tmp_path, step, now, 2.0, chance.uniform(0, 5), save=waited, evaluate=waited / 3)
        if chance.random() < 0.6:
            end(tmp_path, str(number), now + chance.uniform(-3, 9), step, chance.choice([0, 1, 75, None]), save=waited)
    found = goodput_of(tmp_path)
    if found is None:
        assert not any(json.loads(line).get("end") for line in (tmp_path / "starts.jsonl").read_text().splitlines())
        return
    assert min(found.steps, *found.lost.values()) >= -1e-6
    assert found.steps + sum(found.lost.values()) == pytest.approx(found.wall)
    assert 0 <= found.share <= 1


def test_a_pause_before_the_first_line_is_no_start_up(tmp_path: Path) -> None:
    """It owns the directory at 10, saves for 5 s, and its first step ends at 20: 3 s until the step began are start-up, too."""
    begin(tmp_path, "a", 0, 10)
    log(tmp_path, 1, 20, save=5.0)
    log(tmp_path, 2, 22, save=5.0)
    found = goodput_of(tmp_path)
    assert found is not None and found.lost == lost(start_up=13, checkpoints=5) and found.steps == pytest.approx(4)


def test_the_lowest_of_several_restarts_decides_which_lines_are_void(tmp_path: Path) -> None:
    first_start(tmp_path)
    begin(tmp_path, "b", 110, 115, 10)
    begin(tmp_path, "c", 120, 125, 30)
    run = overview(tmp_path, EPOCH + 130)
    assert (run.step, run.loss) == (30, pytest.approx(9 - 10 / 10))
