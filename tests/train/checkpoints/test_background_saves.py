"""Saves in the background, in a run: the same checkpoints, the same bits, and no step that waits for a disk."""

import errno
import logging
import re
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from forge_ckpt import background as module
from forge_ckpt.format.names import MANIFEST
from forge_ckpt.store.local import LocalStore
from forge_core.errors import CheckpointError, Superseded
from forge_train.run.loop import fit
from harness.pool import World
from train.runs import TINY, digest, prepared, train

ASYNC = ["--checkpoint.mode=async"]
THREAD = [*ASYNC, "--checkpoint.saver=thread"]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def finished(recipe: Path, overrides: list[str]) -> dict[str, Any]:
    run, recorder = prepared(recipe, overrides)
    assert fit(run) == "finished"
    run.saves.close()
    return {"losses": recorder.losses, "weights": digest(run)}


def files(directory: Path) -> dict[str, bytes]:
    """All bytes of tensors in a run's checkpoints."""
    root = directory / "checkpoints"
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.name not in (MANIFEST, "owner")
    }


@pytest.mark.parametrize("how", [ASYNC, THREAD])
def test_the_checkpoints_are_those_of_a_run_that_waits(recipe: Path, tmp_path: Path, how: list[str]) -> None:
    expected = train(recipe, [f"--job.dir={tmp_path / 'sync'}"])
    found = finished(recipe, [f"--job.dir={tmp_path / 'async'}", *how])
    assert found["weights"] == expected["weights"] and found["losses"] == expected["losses"]
    assert files(tmp_path / "async") == files(tmp_path / "sync") and len(files(tmp_path / "sync")) > 3


def _cut(recipe: Path, folder: Path, *overrides: str) -> tuple[list[float], str]:
    losses: list[float] = []
    for steps in (4, 8):
        run, recorder = prepared(
            recipe, [f"--job.dir={folder}", "--schedule.name=constant", f"--train.max_steps={steps}", *overrides]
        )
        fit(run)
        run.saves.close()
        losses += recorder.losses
    return losses, digest(run)


@pytest.mark.parametrize("how", [ASYNC, pytest.param(THREAD, marks=pytest.mark.slow)])
def test_fault_17_a_sharded_run_resumes_to_the_bit(world: World, recipe: Path, tmp_path: Path, how: list[str]) -> None:
    whole = world.run(train, 2, recipe, [f"--job.dir={tmp_path / 'whole'}", "--schedule.name=constant"])
    for rank, (losses, weights) in enumerate(world.run(_cut, 2, recipe, tmp_path / "cut", *how)):
        assert losses == whole[rank]["losses"] and weights == whole[rank]["weights"]


def broken(monkeypatch: pytest.MonkeyPatch, steps: Iterable[int]) -> None:
    """Files of these steps find no space."""
    write = LocalStore.write

    def full(self: LocalStore, path: str, chunks: Any) -> None:
        step = re.search(r"step-(\d+)", path)
        if step and int(step[1]) in steps:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(self, path, chunks)

    monkeypatch.setattr(LocalStore, "write", full)


@pytest.mark.parametrize("how", [[], THREAD], ids=["sync", "thread"])
def test_fault_2_a_full_disk_costs_one_checkpoint_and_no_step(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: list[str]
) -> None:
    expected = train(recipe, [f"--job.dir={tmp_path / 'whole'}"])
    broken(monkeypatch, [6])
    run, recorder = prepared(recipe, [f"--job.dir={tmp_path / 'run'}", *how])
    assert fit(run) == "finished"
    run.saves.close()
    assert recorder.losses == expected["losses"] and digest(run) == expected["weights"]
    names = sorted(
        name for name in LocalStore(tmp_path / "run" / "checkpoints").list() if name.startswith(("step", ".", "saving"))
    )
    assert names == ["step-00000003", "step-00000008"]
    assert run.health.saves == [3, 8]
    (said,) = (record.message for record in caplog.records if "step 6 was not saved" in record.message)
    assert "no space left" in said and "needs" in said and said in run.health.summary()


@pytest.mark.parametrize("how", [[], THREAD], ids=["sync", "thread"])
def test_the_last_step_must_be_saved(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: list[str]) -> None:
    broken(monkeypatch, [8])
    run, _ = prepared(recipe, [f"--job.dir={tmp_path / 'run'}", *how])
    with pytest.raises(CheckpointError, match=r"step 8 was not saved.*no space left"):
        fit(run)
    run.saves.close()


@pytest.mark.parametrize(("busy", "kept"), [("skip", [1, 8]), ("queue", [1, 2, 8])])
def test_what_is_left_out_is_said_and_the_last_step_is_there(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: str, kept: list[int]
) -> None:
    run, _ = prepared(
        recipe, [f"--job.dir={tmp_path}", *THREAD, f"--checkpoint.busy={busy}", "--checkpoint.every=1", "--checkpoint.keep=0"]
    )
    write, finish, opened, ends = module.write, run.saves.finish, [], threading.Event()

    def slow(*given: Any) -> str:
        ends.wait()
        opened.append(given[2].step)
        return write(*given)

    def end() -> None:
        ends.set()
        finish()

    monkeypatch.setattr(module, "write", slow)
    run.saves.finish = end  # type: ignore[method-assign]
    fit(run)
    run.saves.close()
    assert opened == kept[:-1]
    names = [name for name in LocalStore(tmp_path / "checkpoints").list() if name.startswith("step")]
    assert names == [f"step-{step:08d}" for step in kept]
    assert sum("was not saved, because the save before it" in line for line in run.health.summary()) == 8 - len(opened)


def test_fault_14_a_newer_job_ends_one_that_saves_in_the_background(recipe: Path, tmp_path: Path) -> None:
    here = [f"--job.dir={tmp_path}", *ASYNC]
    older, _ = prepared(recipe, here)
    older.stop.looked = float("inf")  # it does not look while it trains
    newer, _ = prepared(recipe, here)
    with pytest.raises(Superseded):
        fit(older)
    older.saves.close()
    assert not list((tmp_path / "checkpoints").glob("step-*")), "the process that saves looks at the mark, too"
    assert fit(newer) == "finished"
    newer.saves.close()


def test_too_little_memory_is_refused_and_nothing_is_changed(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "available_memory", lambda: 1000)
    with pytest.raises(CheckpointError, match=r"of memory left.*checkpoint.mode = 'sync'"):
        prepared(recipe, [f"--job.dir={tmp_path / 'run'}", *ASYNC])
    assert not (tmp_path / "run").exists()


def test_a_saver_logs_through_its_run(recipe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint of a later step is renamed by the saver, which says so."""
    train(recipe, [f"--job.dir={tmp_path}"])
    with caplog.at_level(logging.INFO):
        finished(recipe, [f"--job.dir={tmp_path}", *ASYNC, "--checkpoint.resume=3", "--train.max_steps=5"])
    assert "step-00000008 is later than step 5" in caplog.text
    assert "step-00000005 was written in the background" in caplog.text


def test_a_checkpoint_is_good_by_the_losses_up_to_its_step_however_late_it_ends(recipe: Path, tmp_path: Path) -> None:
    """Step 3 is saved while the loss is in its band and step 6 while it is not; both end after it has left."""
    run, _ = prepared(recipe, [f"--job.dir={tmp_path}", *THREAD, "--checkpoint.busy=queue"])
    saves = run.saves
    for step, left in ((3, None), (6, 5)):
        run.state.step, run.health.band.left = step, left
        run.save()
    saves.settle(wait=True)
    assert run.health.saves == [3]
    run.saves.close()


def test_a_rollback_waits_for_a_save_in_the_background(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the newest good checkpoint, and the advice after a failure names it."""
    run, _ = prepared(recipe, [f"--job.dir={tmp_path}", *THREAD, "--checkpoint.busy=queue"])
    write, free = LocalStore.write, threading.Event()

    def late(self: LocalStore, path: str, chunks: Any) -> None:
        free.wait(10)
        write(self, path, chunks)

    monkeypatch.setattr(LocalStore, "write", late)
    for step, answer in ((3, run.saves.good_step), (6, run.saves.advice)):
        free.clear()
        run.state.step = step
        run.save()
        threading.Timer(0.2, free.set).start()
        assert str(step) in str(answer()), "the answer comes after the save"
    run.saves.close()
