"""Signals that reach ranks at different moments, or one rank only: all stop after the same step, with one checkpoint, whole."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forge_ckpt.checkpoint.read import newest
from forge_ckpt.store.local import LocalStore
from forge_ckpt.world import ProcessGroupWorld, SingleProcessWorld
from forge_core.protocols.run import Hook
from forge_train.process.stop import STOPPED, Signals
from forge_train.run import saves
from forge_train.run.loop import fit
from harness.pool import World
from harness.siblings import fast
from train.runs import TINY, prepared

SMALL = TINY.replace("layers = 2", "layers = 1").replace("micro_batch = 2", 'micro_batch = 4\ncollect_every = "none"')
MOMENTS = ("before_step", "before_update", "after_step")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(SMALL)
    return path


class Sends(Hook):
    """Sends a real signal to this process at a moment of the step that follows `step`; with a delay, while it goes on."""

    def __init__(self, step: int, moment: str, number: int = signal.SIGTERM, delay: float = 0.0) -> None:
        self.step, self.moment, self.number, self.delay = step, moment, number, delay
        setattr(self, moment, self._maybe)

    def _maybe(self, run: Any, result: Any = None) -> None:
        if run.state.step == self.step + (self.moment == "after_step"):
            if self.delay:
                threading.Timer(self.delay, os.kill, (os.getpid(), self.number)).start()
            else:
                os.kill(os.getpid(), self.number)


class Sleeps(Hook):
    def before_step(self, run: Any) -> None:
        if run.state.step == 2:
            time.sleep(0.3)


def _ended(run: Any) -> tuple[str, int, int, list[str]]:
    """Why a run ends, after which step, the step of its newest verified checkpoint, and the steps that have a name."""
    with run.stop.signals.listening():
        reason = fit(run)
    checkpoints = run.directory / "checkpoints"
    found = newest(LocalStore(checkpoints), ProcessGroupWorld() if run.topology.size > 1 else SingleProcessWorld())
    return reason, run.state.step, found.step if found else -1, sorted(path.name for path in checkpoints.glob("step-*"))


def _skewed(recipe: Path, folder: Path, seed: int, times: int) -> list[tuple[Any, int]]:
    """What this rank saw in each draw, and the first step in which some rank had a signal. One run goes on after each stop."""
    draw, seen = random.Random(seed), []
    run, _ = prepared(recipe, [f"--job.dir={folder}", "--checkpoint.every=0", "--checkpoint.keep=1", "--train.max_steps=100000"])
    hooks, rank = run.hooks, run.topology.rank
    for _ in range(times):
        skew, only, earlier = draw.randrange(4), draw.choice([None, None, 0, 1]), draw.randrange(2)
        moments, kinds = draw.choices(MOMENTS, k=2), draw.choices((signal.SIGTERM, signal.SIGUSR2), k=2)
        steps = [run.state.step + (0 if rank == earlier or only is not None else skew) for rank in range(2)]
        asked = min(step for rank, step in enumerate(steps) if only in (None, rank))
        mine = [Sends(steps[rank], moments[rank], kinds[rank])] if only in (None, rank) else []
        run.hooks[:], run.stop.signals, run.stop.agreed = [*mine, *hooks], Signals(), False
        seen.append((_ended(run), asked))
    return seen


def _check(ranks: list[list[tuple[Any, int]]]) -> None:
    for number, ((one, asked), (other, _)) in enumerate(zip(*ranks, strict=True)):
        assert one == other, f"draw {number}"
        reason, step, saved, names = one
        assert (reason, names) == (STOPPED, [f"step-{step:08d}"]) and saved == step, f"draw {number}"
        assert asked + 1 <= step <= asked + 2, f"draw {number}: asked in the step after {asked}"


def test_fault_27_ranks_that_hear_signals_at_different_steps_stop_after_the_same_one(
    world: World, recipe: Path, tmp_path: Path
) -> None:
    _check(world.run(_skewed, 2, recipe, tmp_path / "run", 1, 20, timeout=120))


@pytest.mark.slow
def test_fault_27_and_so_they_do_two_hundred_times(world: World, recipe: Path, tmp_path: Path) -> None:
    _check(world.run(_skewed, 2, recipe, tmp_path / "run", 2, 200, timeout=600))


def _in_a_collective(recipe: Path, folder: Path) -> Any:
    """Rank 0 waits in the step for rank 1, which is late, when the signal comes."""
    run, _ = prepared(recipe, [f"--job.dir={folder}", "--checkpoint.every=0"])
    run.hooks[:] = [Sends(2, "before_step", delay=0.15) if run.topology.rank == 0 else Sleeps(), *run.hooks]
    return _ended(run)


def test_fault_28_a_signal_inside_a_collective(world: World, recipe: Path, tmp_path: Path) -> None:
    one, other = world.run(_in_a_collective, 2, recipe, tmp_path / "run", timeout=60)
    assert one == other and one[0] == STOPPED and one[1:3] in ((3, 3), (4, 4)) and len(one[3]) == 1


@pytest.mark.parametrize("place", ["first step", "backward", "optimizer", "save", "data"])
def test_fault_28_a_signal_in_every_part_of_a_step(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    run, _ = prepared(recipe, [f"--job.dir={tmp_path}", "--checkpoint.every=3"])
    sent: list[int] = []

    def send() -> None:
        if not sent:
            sent.append(run.state.step)
            os.kill(os.getpid(), signal.SIGUSR2)

    if place == "first step":
        run.hooks[:] = [Sends(0, "before_step"), *run.hooks]
        sent.append(0)
    elif place == "backward":
        next(iter(run.model.parts[0].parameters())).register_hook(lambda gradient: send())
    elif place == "optimizer":
        step = run.optimizer.step
        run.optimizer.step = lambda *given: (send(), step(*given))[1]  # type: ignore[method-assign]
    elif place == "save":
        written = saves.write
        monkeypatch.setattr(saves, "write", lambda *given: (send(), written(*given))[1])
    else:
        drawn = run.data.from_cursor

        def waiting(cursor: Any) -> Iterator[Any]:
            for number, item in enumerate(drawn(cursor)):
                if number == 2:
                    send()
                yield item

        run.data.from_cursor = waiting  # type: ignore[method-assign]
    reason, step, saved, _ = _ended(run)
    assert (reason, saved) == (STOPPED, step) and len(sent) == 1 and sent[0] <= step <= sent[0] + 2


@pytest.mark.parametrize("seconds", fast(0.05, of=[0.05, 0.6, 1.5, 3.0]))
def test_fault_28_a_signal_while_modules_are_imported_leaves_nothing(recipe: Path, tmp_path: Path, seconds: float) -> None:
    """Before a run listens, a signal ends the process as it ends any other."""
    worker = subprocess.Popen(
        [sys.executable, "-m", "forge_train", "run", str(recipe), "--train.max_steps=100000"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    time.sleep(seconds)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) in (-signal.SIGTERM, 75)
    assert not (tmp_path / "runs").exists()
