"""Hook `profile`: which steps, on which ranks, and that training and the run do not depend on it."""

import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core.errors import ConfigError
from forge_core.protocols.run import Hook
from forge_train.hooks.profile import Profile
from forge_train.profiling.summary import Summary, summarize
from forge_train.profiling.trace import chosen_traces, read_trace, windows
from forge_train.recipe.load import load_recipe
from forge_train.run.loop import fit
from forge_train.trackers import METRICS
from forge_train.trackers import read_metrics as metrics_of
from harness.pool import World
from harness.siblings import fast
from train.runs import TINY, prepared, train

SMALL = ("--model.layers=1", "--train.global_batch=4")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def with_hook(recipe: Path, keys: str, *more: str) -> dict[str, Any]:
    hooks = f"--hooks=[{{name='profile', {keys}}}, {{name='save'}}]"
    return train(recipe, [f"--job.dir={recipe.parent / 'run'}", *SMALL, hooks, *more])


def forwards(path: Path, steps: int) -> Summary:
    """The summary of a trace that has exactly so many steps: SMALL has two micro-batches in one."""
    found = summarize(read_trace(path))
    assert {row.name: row.count for row in found.annotations if row.name in ("forge/forward", "forge/optimizer")} == {
        "forge/forward": 2 * steps,
        "forge/optimizer": steps,
    }
    assert found.about["steps"] == steps
    return found


def test_training_is_the_same_bit_by_bit_and_the_classes_sum_to_the_window(recipe: Path, tmp_path: Path) -> None:
    alone = train(recipe, [f"--job.dir={tmp_path / 'alone'}", *SMALL])
    profiled = with_hook(recipe, "at=[3], steps=2, shapes=true")
    assert {key: profiled[key] for key in alone} == alone
    (folder,) = windows(tmp_path / "run").values()
    assert [path.name for path in folder.iterdir()] == ["rank-0.json.gz"]
    found = forwards(folder / "rank-0.json.gz", steps=2)
    assert found.about == {"rank": 0, "world": 1, "step": 3, "steps": 2, "device": "cpu"}
    assert sum(found.classes.values()) == found.window > 0 and found.classes["compute"] > 0
    assert found.classes["overlapped"] == found.classes["exposed"] == 0, "one process exchanges nothing"
    names = {row.name for row in found.annotations}
    assert {"forge/data", "forge/forward", "forge/backward", "forge/reduce", "forge/optimizer"} <= names
    logged = [entry for entry in metrics_of(tmp_path / "run" / METRICS) if "profile/compute" in entry]
    assert [entry["step"] for entry in logged] == [4], "it is written before the step after the window"
    shares = [value for name, value in logged[0].items() if name.startswith("profile/") and name != "profile/step_seconds"]
    assert len(shares) == 5 and sum(shares) == pytest.approx(1)
    assert logged[0]["profile/step_seconds"] == pytest.approx(found.window / 2 / 1e9)
    parts = {name: value for name, value in logged[0].items() if name.startswith("split/")}
    assert {"split/forward", "split/backward", "split/optimizer", "split/exposed", "split/host"} <= parts.keys()
    assert sum(parts.values()) == pytest.approx(logged[0]["profile/step_seconds"])
    assert parts["split/exposed"] == 0 and all(parts[f"split/{name}"] > 0 for name in ("forward", "backward", "optimizer"))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("at=[1], steps=1", {1: 1}),  # the window begins with the first step, so no step is left for the warm-up
        ("at=[2, 6], steps=2, warmup=2", {2: 2, 6: 2}),
        pytest.param("every=4, steps=1", {4: 1, 8: 1}, marks=pytest.mark.slow),
        pytest.param("at=[7], steps=3", {7: 2}, marks=pytest.mark.slow),  # the run ends after 8
        ("at=[1, 3, 5, 7], steps=1, keep=2", {5: 1, 7: 1}),
    ],
)
def test_windows_are_at_the_steps_that_were_asked_for(recipe: Path, tmp_path: Path, keys: str, expected: dict[int, int]) -> None:
    with_hook(recipe, keys)
    assert list(windows(tmp_path / "run")) == list(expected)
    for first, steps in expected.items():
        assert forwards(chosen_traces(tmp_path / "run", first)[0], steps).about["step"] == first


def test_a_run_that_ends_in_the_warm_up_leaves_nothing(recipe: Path, tmp_path: Path) -> None:
    run, _ = prepared(recipe, [f"--job.dir={tmp_path / 'run'}", "--train.max_steps=3"])
    run.hooks[:] = [Profile(at=[5], steps=1, warmup=3)]
    assert fit(run) == "finished"
    assert windows(tmp_path / "run") == {}
    assert not torch.autograd._profiler_enabled()


@pytest.mark.parametrize(("at", "expected"), [(5, (2, 3)), (2, (1, 1)), (1, (1, 0))])
def test_the_profiler_warms_up_for_the_steps_before(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, expected: tuple[int, int]
) -> None:
    begun: list[tuple[int, int]] = []
    run, _ = prepared(recipe, [f"--job.dir={tmp_path / 'run'}", *SMALL])
    monkeypatch.setattr(Profile, "_start", lambda _, device, warmup: begun.append((run.state.step + 1, warmup)))
    run.hooks[:] = [Profile(at=[at], steps=1, warmup=3)]
    fit(run)
    assert begun == [expected], "the step in which it starts, and how many of them are not recorded"


def test_a_resume_profiles_what_is_left(recipe: Path, tmp_path: Path) -> None:
    with_hook(recipe, "at=[2], steps=1", "--train.max_steps=4", "--schedule.name=constant")
    with_hook(recipe, "at=[2, 6], steps=1", "--schedule.name=constant")
    assert list(windows(tmp_path / "run")) == [2, 6]
    forwards(chosen_traces(tmp_path / "run", 6)[0], 1)


def full_disk(*_: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    "where",
    fast(
        "recorder.profiled",
        "summary.summarize",
        of=["recorder.publish", "recorder._write", "summary.summarize", "recorder.profiled", "recorder.record_function"],
    ),
)
def test_a_failure_of_the_profile_costs_a_warning(
    recipe: Path, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    alone = train(recipe, [f"--job.dir={tmp_path / 'alone'}", *SMALL])
    monkeypatch.setattr(f"forge_train.profiling.{where}", full_disk)
    with caplog.at_level(logging.WARNING):
        profiled = with_hook(recipe, "at=[2, 6], steps=1")
    assert {key: profiled[key] for key in alone} == alone
    assert [record.getMessage() for record in caplog.records if "profile failed" in record.getMessage()] == [
        "profile failed (OSError: [Errno 28] No space left on device); the run goes on without it"
    ] * 2
    assert not [path for path in (tmp_path / "run").rglob("*") if path.name.startswith(".") and "rank-" in path.name]
    assert not torch.autograd._profiler_enabled()


def test_a_snapshot_of_memory_is_said_to_be_missing_on_a_cpu(
    recipe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with_hook(recipe, "at=[2], steps=1, memory=true")
    assert "hooks.profile.memory: the allocator of this device records no history" in caplog.text
    assert [path.name for path in windows(tmp_path / "run")[2].iterdir()] == ["rank-0.json.gz"]


class Sends(Hook):
    """Sends a signal to this process before a step."""

    def __init__(self, step: int, send: Callable[[], None]) -> None:
        self.step, self.send = step, send

    def before_step(self, run: Any) -> None:
        if run.state.step + 1 == self.step:
            self.send()


def profiled_on_a_signal(recipe: str, directory: str, sender: int, ranks: Any) -> tuple[str, str, int]:
    run, _ = prepared(Path(recipe), [f"--job.dir={directory}", "--checkpoint.every=0"])
    hook = Profile(steps=2, signal="SIGUSR2", ranks=ranks)
    sends = Sends(3, lambda: os.kill(os.getpid(), signal.SIGUSR2)) if run.topology.rank == sender else Hook()
    run.hooks[:] = [sends, hook]
    before = signal.getsignal(signal.SIGUSR2)
    with run.stop.signals.listening():
        reason = fit(run)
    assert signal.getsignal(signal.SIGUSR2) is before
    return reason, run.stop.signals.asked, run.requests.trace_step


@pytest.mark.parametrize(
    ("ranks", "written"), fast(("all", [0, 1]), ([1], [1]), of=[("all", [0, 1]), ([1], [1]), ("nodes", [0])])
)
def test_a_signal_to_one_rank_opens_the_same_window_on_all(
    world: World, recipe: Path, tmp_path: Path, ranks: Any, written: list[int]
) -> None:
    found = world.run(profiled_on_a_signal, 2, str(recipe), str(tmp_path / "run"), 1, ranks)
    assert found == [("finished", "", 3)] * 2, "the wish of step 3 has come with its numbers, and ends no run"
    # Step 3 carries it, step 4 warms up, steps 5 and 6 are recorded.
    traces = chosen_traces(tmp_path / "run", 5)
    assert list(windows(tmp_path / "run")) == [5] and list(traces) == written
    for rank, path in traces.items():
        one = summarize(read_trace(path))
        assert (one.about["rank"], one.about["world"], one.about["step"], one.about["steps"]) == (rank, 2, 5, 2)
        assert sum(one.classes.values()) == one.window
        assert one.classes["exposed"] + one.classes["overlapped"] > 0, "gradients and numbers are summed over gloo"
        if one.classes["exposed"]:  # on a busy machine, gloo's threads may run beside computation only
            assert any(row.collective.startswith("gloo:") for row in one.exposed)
        assert one.split["exposed"] == one.classes["exposed"] and sum(one.split.values()) == one.window


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ("steps=3", "never begins"),
        ("at=[9]", "step 9 comes after the last step, train.max_steps = 8"),
        ("at=[2, 5]", "windows of 1 warm-up and 3 active steps overlap at steps 2 and 5"),
        ("every=3", "overlap at steps 3 and 6"),
        ("at=[2], every=4, steps=2", "overlap at steps 2 and 4"),
        ("at=[2], ranks=[0, 1]", "rank 1 does not exist: 1 processes run"),
        ("at=[0]", "greater than 0"),
        ("at=[2], signal='SIGTERM'", "SIGUSR1"),
    ],
)
def test_windows_that_cannot_be_are_refused(recipe: Path, keys: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_recipe(recipe, [f"--hooks=[{{name='profile', {keys}}}, {{name='save'}}]"], 1)
    assert says in str(refused.value) and "hooks.0" in str(refused.value)


def test_two_profilers_are_refused(recipe: Path) -> None:
    with pytest.raises(ConfigError, match=r"hooks\.1\.name: 'profile' is listed twice"):
        load_recipe(recipe, ["--hooks=[{name='profile', at=[2], steps=1}, {name='profile', at=[6], steps=1}, {name='save'}]"], 1)
