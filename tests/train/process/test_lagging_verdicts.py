"""A run that reads the verdict of a step when the next one is queued, as on an accelerator, against one that reads it at once.

The CPU is told to lag here; that a device does is in `tests/rehearsal`. Losses become infinite at steps that a test chooses.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core.protocols.run import Hook
from forge_train.process.stop import FINISHED, STOPPED, TrainingError
from forge_train.run.loop import fit
from forge_train.run.run import Run
from forge_train.trackers import METRICS
from harness.pool import World
from harness.siblings import fast
from train.runs import TINY, digest, prepared

HOOKS = "--hooks=[{name='log',every=2},{name='save'},{name='evaluate',every=4}]"
EVALUATED = "--data.evaluation.held_out={name='random', vocab_size=61, tokens=400, document=23}"
CLOCKS = ("time", "pauses/", "tokens_per_second", "step_seconds", "peak_memory", "model_tflops", "mfu", "mfu_attended")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


@dataclass
class Poisoned:
    """A step whose loss is infinite at some steps, and that writes down what was queued; `run` is its own."""

    run: Any
    inner: Any
    bad: tuple[int, ...]
    events: list[tuple[str, int]]

    def __call__(self, batches: Any, stop: bool = False, trace: bool = False) -> Any:
        number = self.run.state.step + 1
        self.events.append(("queued", number))
        if number not in self.bad:
            return self.inner(batches, stop, trace)

        def infinite(*given: Any) -> Any:
            terms = self.inner.objective(*given)
            return terms._replace(sum=terms.sum * torch.inf)

        return replace(self.inner, objective=infinite)(batches, stop, trace)

    def evaluate(self, batches: Any) -> Any:
        return self.inner.evaluate(batches)


class Ends(Hook):
    """Notes the ends of steps and why the run would end after them; asks for that in one of them, on one rank."""

    def __init__(self, events: list[tuple[str, int]], at: int = 0, rank: int = 0) -> None:
        self.events, self.at, self.rank = events, at, rank
        self.reasons: list[str] = []

    def before_step(self, run: Any) -> None:
        if run.state.step + 1 == self.at and run.topology.rank == self.rank:
            run.stop.signals.asked = "SIGTERM"

    def after_step(self, run: Any, result: Any) -> None:
        self.events.append(("ended", run.state.step))
        self.reasons.append(run.stop.reason(run.state))


def watched(recipe: Path, folder: Path, lag: int, *settings: str, bad: tuple[int, ...] = (), at: int = 0, rank: int = 0) -> Any:
    """(run, its events, the hook that asks it to stop): what is queued, judged, saved and ended, by number of step."""
    run, recorder = prepared(recipe, [f"--job.dir={folder}", EVALUATED, *settings])
    events: list[tuple[str, int]] = []
    run.lag = lag
    run.training.step = Poisoned(run, run.step.step, bad, events)  # type: ignore[attr-defined]
    judge, save = run.health.after, run.health.saved

    def judged(step: int, result: Any) -> None:
        events.append(("judged", step))
        judge(step, result)

    def saved(step: int, inside: bool) -> None:
        events.append(("saved", step))
        save(step, inside)

    run.health.after, run.health.saved = judged, saved  # type: ignore[method-assign]
    hook = Ends(events, at, rank)
    run.hooks[:] = [*(one for one in run.hooks if one is not recorder), hook]
    return run, events, hook


def kept(folder: Path) -> dict[str, Any]:
    """What checkpoints keep of the run besides tensors, and every line of its numbers but for its clocks."""
    manifests = {
        path.parent.name: json.loads(path.read_text())["manifest"] for path in folder.glob("checkpoints/step-*/manifest.json")
    }
    assert manifests
    lines = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    return {
        "meta": {name: (found["meta"]["health"], found["meta"]["cursor"]) for name, found in manifests.items()},
        "metrics": [{key: value for key, value in line.items() if not key.startswith(CLOCKS)} for line in lines],
    }


def lasting(recipe: Path, folder: Path, lag: int) -> tuple[str, str, dict[str, Any], list[str]]:
    settings = [HOOKS, "--checkpoint.keep=9", "--train.max_steps=9"]
    run, _, _ = watched(recipe, folder, lag, *settings, bad=(2, 3, 4, 8))
    reason = fit(run)
    for tracker in run.trackers:
        tracker.close()
    return reason, digest(run), kept(folder), run.health.summary()


def test_all_that_lasts_of_a_run_is_the_same(recipe: Path, tmp_path: Path) -> None:
    """Weights, optimizer, what checkpoints keep of skipped steps and of the band, and each number of each line of the log."""
    at_once, later = lasting(recipe, tmp_path / "at once", 0), lasting(recipe, tmp_path / "later", 1)
    assert later == at_once
    lines = {line["step"]: line for line in at_once[2]["metrics"] if "loss" in line}
    assert [lines[step].get("skipped_steps") for step in (1, 2, 4, 6, 8, 9)] == [None, 1, 3, 3, 4, 4]
    assert [lines[step]["skipped"] for step in (1, 2, 4, 6, 8, 9)] == [0, 1, 1, 0, 1, 0]
    assert at_once[2]["meta"]["step-00000003"][0]["skipped"] == 2


def test_a_verdict_waits_for_the_next_step_but_not_for_what_depends_on_it(recipe: Path, tmp_path: Path) -> None:
    folders: list[Path] = []

    def order(lag: int, *settings: str) -> str:
        folders.append(tmp_path / f"run {len(folders)}")
        run, events, _ = watched(recipe, folders[-1], lag, "--train.max_steps=5", *settings)
        fit(run)
        return " ".join(f"{what[0]}{step}" for what, step in events)

    assert order(0) == "q1 j1 e1 q2 j2 e2 q3 j3 s3 e3 q4 j4 e4 q5 j5 e5 s5"
    assert order(1) == "q1 e1 q2 j1 e2 q3 j2 j3 s3 e3 q4 e4 q5 j4 e5 j5 s5"
    assert order(1, "--hooks=[]") == "q1 e1 q2 j1 e2 q3 j2 e3 q4 j3 e4 q5 j4 e5 j5"
    evaluating = "--hooks=[{name='evaluate',every=2}]"
    assert order(1, evaluating) == "q1 e1 q2 j1 j2 e2 q3 e3 q4 j3 j4 e4 q5 e5 j5"
    timed = "--parallel.step_timeout=7"
    assert order(1, timed, "--hooks=[]").startswith("q1 e1 j1 q2 e2 q3 j2"), "other ranks may still compile step 1"


@pytest.mark.parametrize(("lag", "at", "last", "reason"), [
    (1, 4, 5, STOPPED), (0, 8, 8, STOPPED), (1, 9, 8, FINISHED),
    *fast(of=[(0, 4, 4, STOPPED), (1, 8, 8, STOPPED), (0, 9, 8, FINISHED), (1, 3, 3, STOPPED)]),
])  # fmt: skip
def test_a_request_to_stop_is_heard_one_step_later_at_most(
    recipe: Path, tmp_path: Path, lag: int, at: int, last: int, reason: str
) -> None:
    run, events, hook = watched(recipe, tmp_path, lag, "--hooks=[{name='save'}]", "--checkpoint.every=3", at=at)
    assert fit(run) == reason
    assert run.state.step == last
    assert ("saved", last) in events
    assert [bool(found) for found in hook.reasons[:-1]] == [False] * (last - 1), "hooks see the last step, and no other, as one"


def _stopped(recipe: Path, folder: Path, rank: int) -> tuple[int, str, list[tuple[str, int]]]:
    settings = ["--parallel.dp_shard=2", "--hooks=[{name='log',every=2}]", "--train.max_steps=20"]
    run, events, _ = watched(recipe, folder, 1, *settings, at=6, rank=rank)
    reason = fit(run)
    return run.state.step, reason, events


@pytest.mark.parametrize("rank", [0, 1])
def test_fault_27_all_ranks_stop_after_the_same_step_though_one_of_them_writes_the_log(
    world: World, recipe: Path, tmp_path: Path, rank: int
) -> None:
    first, second = world.run(_stopped, 2, recipe, tmp_path / "run", rank)
    assert first == second
    assert first[1] == STOPPED and first[2][-2:] == [("judged", 6), ("ended", 6)], "the log of step 6 asked for its verdict"


def test_too_many_skipped_steps_end_the_run_one_step_later_and_nothing_is_saved(recipe: Path, tmp_path: Path) -> None:
    for lag in (0, 1):
        folder = tmp_path / str(lag)
        settings = ["--train.max_skipped=2", "--hooks=[{name='save'}]", "--checkpoint.every=6"]
        run, events, _ = watched(recipe, folder, lag, *settings, bad=(2, 4))
        with pytest.raises(TrainingError, match=r"2 of the last 4 steps .*\(last: step 4, loss inf"):
            fit(run)
        assert run.state.step == 4 + lag
        assert events[-1] == ("judged", 4)
        assert not list(folder.glob("checkpoints/step-*"))


def test_the_verdict_of_the_last_steps_is_not_forgotten(recipe: Path, tmp_path: Path) -> None:
    run, events, _ = watched(recipe, tmp_path, 1, "--train.max_skipped=1", "--train.max_steps=4", "--hooks=[]", bad=(4,))
    with pytest.raises(TrainingError, match="last: step 4"):
        fit(run)
    assert events[-1] == ("judged", 4)


def test_a_checkpoint_that_a_hook_asks_for_waits_for_the_verdict(recipe: Path, tmp_path: Path) -> None:
    class Saves(Hook):
        def after_step(self, run: Any, result: Any) -> None:
            if run.state.step == 2:
                run.save()

    run, _, _ = watched(recipe, tmp_path, 1, "--train.max_steps=3", "--train.max_skipped=1", bad=(2,))
    run.hooks[:] = [Saves()]
    with pytest.raises(TrainingError, match="last: step 2"):
        fit(run)
    assert not list(tmp_path.glob("checkpoints/step-*"))


def test_a_cpu_reads_at_once(recipe: Path, tmp_path: Path) -> None:
    run: Run = prepared(recipe, [f"--job.dir={tmp_path}"])[0]
    assert run.lag == 0
