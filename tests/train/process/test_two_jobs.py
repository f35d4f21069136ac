"""A second job in the run's directory: the first one ends and says why, the second one's history is a single run's."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from forge_ckpt.checkpoint.fence import Fence
from forge_ckpt.checkpoint.read import VerifiedCheckpoint
from forge_ckpt.store.local import LocalStore
from forge_ckpt.world import SingleProcessWorld
from forge_core.errors import CheckpointError, Superseded
from forge_core.protocols.checkpoint import Store
from forge_train.run.checkpoints import Checkpoints
from forge_train.run.loop import fit
from forge_train.trackers import read_metrics
from harness.pool import World
from train.runs import TINY, digest, prepared, train

SLOW = '''
import time
from dataclasses import dataclass

from forge_core.component import Component
from forge_core.protocols.run import Hook


class Waiting(Hook):
    def before_step(self, run):
        time.sleep(0.2)


@dataclass(frozen=True, kw_only=True)
class Waits(Component):
    """Makes steps slow enough to be interrupted."""

    def build(self):
        return Waiting()
'''

HOOKS = """
[[hooks]]
name = "log"
every = 1

[[hooks]]
name = "./slow.py:Waits"
"""


def recipe(folder: Path) -> Path:
    path, fresh = folder / "tiny.toml", folder / f"{os.getpid()}.toml"
    fresh.write_text(TINY)
    fresh.replace(path)  # another rank may be reading it
    return path


def test_fault_14_an_older_job_saves_nothing_and_the_newer_one_ends_as_a_single_run(tmp_path: Path) -> None:
    expected = train(recipe(tmp_path), [f"--job.dir={tmp_path / 'alone'}"])
    here = f"--job.dir={tmp_path / 'shared'}"
    older, _ = prepared(recipe(tmp_path), [here])
    older.stop.looked = time.monotonic() + 3600  # it does not look while it trains
    newer, _ = prepared(recipe(tmp_path), [here])
    with pytest.raises(Superseded, match="another job, process"):
        fit(older)
    assert older.state.step == 3, "the first save found the mark"
    assert fit(newer) == "finished"
    assert digest(newer) == expected["weights"]
    names = sorted(path.name for path in (tmp_path / "shared" / "checkpoints").iterdir())
    assert names == ["forge-checkpoints", "latest", "owner", "step-00000003", "step-00000006", "step-00000008"]


def test_a_job_that_looks_ends_after_a_step_and_writes_no_last_words(tmp_path: Path) -> None:
    here = f"--job.dir={tmp_path / 'shared'}"
    older, _ = prepared(recipe(tmp_path), [here, "--hooks=[{name='save'}, {name='log', every=1}]"])
    prepared(recipe(tmp_path), [here])
    with pytest.raises(Superseded):
        fit(older)
    assert older.state.step == 1
    assert not (tmp_path / "shared" / "checkpoints" / "latest").exists()
    assert not (tmp_path / "shared" / "metrics.jsonl").exists()


def test_a_job_without_saves_ends_too(tmp_path: Path) -> None:
    here = f"--job.dir={tmp_path / 'shared'}"
    older, _ = prepared(recipe(tmp_path), [here, "--hooks=[{name='log', every=1}]"])
    prepared(recipe(tmp_path), [here])
    with pytest.raises(Superseded):
        fit(older)


def _superseded(folder: Path) -> tuple[int, str]:
    """Ranks of one job, of which rank 0 alone sees the newer one."""
    older, _ = prepared(recipe(folder), [f"--job.dir={folder / 'shared'}"])
    if older.topology.rank == 0:
        Fence.take(LocalStore(folder / "shared" / "checkpoints"), SingleProcessWorld())
    try:
        fit(older)
    except Superseded as found:
        return older.state.step, str(found)
    return older.state.step, ""


def test_fault_14_all_ranks_end_after_the_same_step(world: World, tmp_path: Path) -> None:
    outcomes = world.run(_superseded, 2, tmp_path)
    assert {step for step, _ in outcomes} == {1}
    assert all(said.startswith("another job, process") for _, said in outcomes)


def test_what_an_older_job_saves_while_the_newer_one_starts_is_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = f"--job.dir={tmp_path / 'shared'}"
    expected = train(recipe(tmp_path), [f"--job.dir={tmp_path / 'alone'}", "--schedule.name=constant"])
    older, _ = prepared(recipe(tmp_path), [here, "--train.max_steps=5", "--schedule.name=constant"])
    restore, own = Checkpoints.restore, Checkpoints.own
    restored = []

    def late(checkpoints: Checkpoints, store: Store) -> Fence:
        assert fit(older) == "finished"
        return own(checkpoints, store)

    def noted(checkpoints: Checkpoints, found: VerifiedCheckpoint, *rest: Any) -> Any:
        restored.append(found.step)
        return restore(checkpoints, found, *rest)

    monkeypatch.setattr(Checkpoints, "own", late)
    monkeypatch.setattr(Checkpoints, "restore", noted)
    newer, _ = prepared(recipe(tmp_path), [here, "--schedule.name=constant"])
    assert restored == [5]
    assert newer.state.step == 5
    assert fit(newer) == "finished"
    assert digest(newer) == expected["weights"]


def test_a_start_that_is_refused_leaves_the_older_job_alone(tmp_path: Path) -> None:
    here = f"--job.dir={tmp_path / 'shared'}"
    older, _ = prepared(recipe(tmp_path), [here])
    older.save()
    with pytest.raises(CheckpointError, match=r"train\.global_batch was 8, is 16"):
        prepared(recipe(tmp_path), [here, "--train.global_batch=16"])
    older.stop.check()
    assert fit(older) == "finished"


@pytest.mark.slow
def test_fault_14_at_the_command_line_the_older_job_exits_with_4(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    recipe, save, rest = TINY.replace("max_steps = 8", "max_steps = 3000").partition("\n[[hooks]]")
    # It saves after it logs: a job that is superseded in between would leave a checkpoint of a step that it did not log.
    (tmp_path / "tiny.toml").write_text(recipe + HOOKS + save + rest)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def start(*options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "forge_train", "run", "tiny.toml", *options]
        return subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    older = start()
    checkpoints = tmp_path / "runs" / "tiny" / "checkpoints"
    deadline = time.monotonic() + 60
    while not (checkpoints / "latest").exists():
        assert older.poll() is None, older.stdout
        assert time.monotonic() < deadline
        time.sleep(0.05)
    newer = start("--train.max_steps=200", "--checkpoint.every=50", "--hooks=[{name='log', every=1}, {name='save'}]")
    said, _ = older.communicate(timeout=60)
    assert older.returncode == 4, said
    assert "has taken over the run's directory" in said
    said, _ = newer.communicate(timeout=60)
    assert newer.returncode == 0, said
    assert (checkpoints / "latest").read_text() == "step-00000200\n"
    steps = [entry["step"] for entry in read_metrics(tmp_path / "runs" / "tiny" / "metrics.jsonl")]
    assert steps == list(range(1, 201)), "no line of the older job stands between those of the newer one"
