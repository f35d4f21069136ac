"""Points are trained some at a time; what fails, stops or is there already does not keep the others from going on."""

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from forge_core.errors import ForgeError
from forge_lab.sweep.execution import StopRequests, slots
from forge_lab.sweep.files import SWEEP_FILE, outcome_of, reached, write_recipes
from forge_lab.sweep.processes import command_of, meaning, start, tail
from forge_train.trackers import METRICS
from lab.fake_runs import METRIC, FakeRuns, run_all, sweep_of

GRID = """
recipe = "debug"
[vary]
optimizer.lr = [1e-3, 3e-3]
model.dim = [32, 64]
"""


def loss(job: Any, step: int) -> float:
    return job.model.dim / 64 + 1000 * job.optimizer.lr


@pytest.fixture
def prepared(tmp_path: Path) -> Any:
    made = sweep_of(tmp_path, GRID)
    write_recipes(made)
    return made


@pytest.mark.parametrize("jobs", [1, 3])
def test_every_point_runs_once_and_no_more_at_a_time(prepared: Any, jobs: int) -> None:
    runs = FakeRuns(loss, looks=4)
    found, said = run_all(prepared, runs, jobs)
    assert [name for name, _ in runs.started] == [point.name for point in prepared.points]
    assert runs.most == jobs
    assert {name: (one.status, one.step, one.tokens, one.starts) for name, one in found.items()} == {
        point.name: ("finished", 30, 30 * 8 * 64, 1) for point in prepared.points
    }
    assert {name: one.value for name, one in found.items()} == pytest.approx(
        {point.name: point.values["model.dim"] / 64 + 1000 * point.values["optimizer.lr"] for point in prepared.points}
    )
    assert said[0].startswith("[1/4] lr=0.001_dim=32: started")


def test_a_second_start_has_nothing_to_do(prepared: Any) -> None:
    run_all(prepared, FakeRuns(loss))
    again = FakeRuns(loss)
    run_all(prepared, again)
    assert again.commands == []


def test_points_share_their_prepared_data(prepared: Any, tmp_path: Path) -> None:
    own = prepared.folder(prepared.points[3]) / "data"
    own.mkdir(parents=True)
    run_all(prepared, FakeRuns(loss))
    for point in prepared.points[:3]:
        assert (prepared.folder(point) / "data").resolve() == (tmp_path / "sweep" / "data").resolve()
    assert not own.is_symlink(), "one that has its own keeps it"


def test_a_failed_run_is_started_once_more_and_the_others_go_on(prepared: Any) -> None:
    first, second, third, fourth = (point.name for point in prepared.points)
    runs = FakeRuns(loss, codes={first: [1], second: [-9, 1], third: [2], fourth: [3]})
    found, said = run_all(prepared, runs)
    assert [name for name, _ in runs.started] == [first, second, third, fourth, first, second]
    assert {name: (one.status, one.code, one.starts) for name, one in found.items()} == {
        first: ("finished", 0, 2),
        second: ("failed", 1, 2),
        third: ("failed", 2, 1),
        fourth: ("diverged", 3, 1),
    }
    assert found[second].said[-1] == "it ended with 1" and found[first].said == ()
    assert any("it ended with 2" in line and third in line for line in said)
    later = FakeRuns(loss)
    found, _ = run_all(prepared, later)
    assert [name for name, _ in later.started] == [second, third], "a failure is worth a try when the sweep is started again"
    assert found[third].status == "finished"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_no_result(prepared: Any, value: float) -> None:
    found, _ = run_all(prepared, FakeRuns(lambda job, step: value))
    assert {(one.status, one.value) for one in found.values()} == {("diverged", None)}


def test_a_run_without_the_metric_has_failed(prepared: Any) -> None:
    class Silent(FakeRuns):
        def __call__(self, *given: Any) -> Any:
            made = super().__call__(*given)
            poll, folder = made.poll, prepared.folder(prepared.points[0]).parent / made.recipe.stem

            def without() -> int | None:
                code = poll()
                if code is not None:
                    (folder / METRICS).write_text((folder / METRICS).read_text().replace(METRIC, "other"))
                return code

            made.poll = without  # type: ignore[method-assign]
            return made

    found, _ = run_all(prepared, Silent(loss))
    assert {(one.status, one.said) for one in found.values()} == {("failed", (f"it has no {METRIC!r} at its last step",))}


def test_only_a_value_of_the_last_step_counts(tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text('{"step": 5, "a": 1.0, "tokens": 50}\n{"step": 9, "b": 2.0, "tokens": 90}\n')
    assert reached(tmp_path, "b") == (9, 90, 2.0)
    assert reached(tmp_path, "a") == (9, 90, None)
    (tmp_path / METRICS).write_text('{"step": 5, "a": 1.0}\n{"rewind": 4}\n{"step": 5, "a": 3.0}\n')
    assert reached(tmp_path, "a") == (5, 0, 3.0)


def test_a_request_to_stop_reaches_all_runs_and_no_other_is_started(prepared: Any) -> None:
    asked = StopRequests()

    def during(runs: FakeRuns) -> None:
        if len(runs.commands) == 2:
            asked.times, asked.name = 1, "SIGTERM"

    found, said = run_all(prepared, FakeRuns(loss, looks=5, during=during), 2, asked)
    assert [one.status for one in found.values()] == ["stopped", "stopped", "waiting", "waiting"]
    assert "SIGTERM: stopping 2 runs after they save" in said
    runs = FakeRuns(loss)
    found, _ = run_all(prepared, runs, 2)
    assert len(runs.commands) == 4 and {one.status for one in found.values()} == {"finished"}
    assert [one.starts for one in found.values()] == [2, 2, 1, 1]


def test_the_third_request_ends_runs_at_once(prepared: Any) -> None:
    asked, seen = StopRequests(), []

    class Stubborn(FakeRuns):
        def __call__(self, *given: Any) -> Any:
            made = super().__call__(*given)
            seen.append(made)
            return made

    def during(runs: FakeRuns) -> None:
        asked.times = min(3, asked.times + 1)

    run_all(prepared, Stubborn(loss, looks=6, during=during), 1, asked)
    assert seen[0].stopped == [False, False, True] and len(seen) == 1


def test_signals_are_counted_and_named() -> None:
    asked = StopRequests()
    before = signal.getsignal(signal.SIGUSR1)
    with asked.listening():
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
    assert (asked.times, asked.name) == (2, "SIGUSR1")
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_point_that_was_begun_with_another_recipe_is_refused(prepared: Any, tmp_path: Path) -> None:
    run_all(prepared, FakeRuns(loss))
    before = prepared.recipe_of(prepared.points[0]).read_text()
    changed = sweep_of(tmp_path, GRID, ["--train.grad_clip=0.5"])
    with pytest.raises(ForgeError) as caught:
        write_recipes(changed)
    said = str(caught.value)
    assert said.startswith("4 of 4 points") and "lr=0.001_dim=32: train.grad_clip was 1.0, is 0.5" in said and "--dir" in said
    assert prepared.recipe_of(prepared.points[0]).read_text() == before
    write_recipes(sweep_of(tmp_path, GRID, ["--train.micro_batch=2"]))  # where the work is done may change
    write_recipes(prepared)


def test_a_point_that_was_not_begun_takes_the_new_recipe(prepared: Any, tmp_path: Path) -> None:
    changed = sweep_of(tmp_path, GRID, ["--train.grad_clip=0.5"])
    write_recipes(changed)
    assert "grad_clip = 0.5" in changed.recipe_of(changed.points[0]).read_text()
    assert json.loads((tmp_path / "sweep" / SWEEP_FILE).read_text())["metric"] == METRIC


def test_a_wider_grid_keeps_what_is_done(prepared: Any, tmp_path: Path) -> None:
    run_all(prepared, FakeRuns(loss))
    wider = sweep_of(tmp_path, GRID.replace("3e-3]", "3e-3, 1e-2]"))
    write_recipes(wider)
    runs = FakeRuns(loss)
    run_all(wider, runs)
    assert [name for name, _ in runs.started] == ["lr=0.01_dim=32", "lr=0.01_dim=64"]


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sweep").write_text("a file")
    with pytest.raises(ForgeError, match="--dir=PATH"):
        write_recipes(sweep_of(tmp_path, GRID))


def test_what_is_kept_of_another_version_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "outcome.json").write_text('{"status": "finished", "unknown": 1}')
    assert outcome_of(tmp_path).status == "waiting"


@pytest.mark.parametrize(
    ("jobs", "processes", "accelerators", "given", "devices", "threads"),
    [
        (1, 1, 0, {"OMP_NUM_THREADS": "3"}, [None], None),
        (2, 1, 4, {}, ["0,1", "2,3"], True),
        (2, 2, 4, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, ["4,5", "6,7"], True),
        (3, 1, 2, {}, ["0", "1", "0"], True),
        (2, 1, 5, {}, ["0,1", "2,3"], True),
    ],
)
def test_accelerators_are_dealt_out(
    jobs: int, processes: int, accelerators: int, given: dict, devices: list, threads: bool | None
) -> None:
    places = slots(jobs, processes, accelerators, given)
    assert [place.environment.get("CUDA_VISIBLE_DEVICES") for place in places] == devices
    assert all(("OMP_NUM_THREADS" in place.environment) == bool(threads) for place in places)


def test_cores_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_lab.sweep.execution.usable_cores", lambda: 24)
    assert [place.environment for place in slots(3, 2, 0, {})] == [{"OMP_NUM_THREADS": "4"}] * 3
    assert slots(30, 1, 0, {})[0].environment == {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("jobs", "processes", "words"), [(4, 2, "lower --jobs to 2"), (1, 8, "processes = 8: .* 4 accelerators")]
)
def test_more_processes_than_accelerators_are_refused(jobs: int, processes: int, words: str) -> None:
    with pytest.raises(ForgeError, match=words):
        slots(jobs, processes, 4, {})


def test_what_the_end_of_a_process_means() -> None:
    codes = {0: "finished", 1: "failed", 2: "refused", 3: "diverged", 4: "refused", 5: "lost", 75: "stopped", -9: "failed"}
    codes |= {6: "lost", 7: "diverged", 8: "lost", 93: "refused"}
    assert {code: meaning(code, asked=False) for code in codes} == codes
    assert meaning(1, asked=True) == "stopped", "with any code"
    assert meaning(0, asked=True) == "finished"


def test_a_run_of_several_processes_starts_them_by_itself() -> None:
    assert command_of(["run", "a.toml"])[1:] == ["-m", "forge_train", "run", "a.toml"]
    assert command_of(["run", "a.toml"], 4)[1:] == ["-m", "forge_train", "run", "a.toml", "--processes=4"]


def test_a_run_that_lost_a_rank_or_had_too_little_memory_is_started_again_as_long_as_it_may_help(prepared: Any) -> None:
    """Every start after code 8 has smaller micro-batches, so that more than one more may be needed."""
    first, second, third, fourth = (point.name for point in prepared.points)
    runs = FakeRuns(loss, codes={first: [8, 8, 5, 8], second: [5] * 9, third: [93], fourth: [7]})
    found, said = run_all(prepared, runs)
    assert {name: (one.status, one.code, one.starts) for name, one in found.items()} == {
        first: ("finished", 0, 5),
        second: ("failed", 5, 5),
        third: ("failed", 93, 1),
        fourth: ("diverged", 7, 1),
    }
    assert sum(f"{second}: failed" in line and "will be restarted" in line for line in said) == 4


def test_a_process_gets_its_environment_and_its_output_is_kept(tmp_path: Path) -> None:
    output = tmp_path / "logs" / "one.log"
    for word in ("first", "second"):
        process = start(["sh", "-c", 'echo "$WORD"; echo problem >&2; exit 3'], {"WORD": word}, output)
        while process.poll() is None:
            pass
        assert process.poll() == 3
    assert tail(output, 3) == ("problem", "second", "problem")


def test_a_process_is_asked_to_stop_and_then_ended(tmp_path: Path) -> None:
    output = tmp_path / "log"
    command = ["sh", "-c", 'trap "echo asked" TERM; echo ready; while :; do sleep 0.05; done']
    process = start(command, {}, output)
    while "ready" not in tail(output):
        pass
    process.stop(hard=False)
    while "asked" not in tail(output):
        pass
    assert process.poll() is None
    process.stop(hard=True)
    while process.poll() is None:
        pass
    assert process.poll() == -signal.SIGKILL
    process.stop(hard=False)  # one that has ended is not asked
