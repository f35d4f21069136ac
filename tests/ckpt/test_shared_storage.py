"""Storage that nodes share: what a rank sees late or never, clocks that differ, links, and a disk that fails for a moment."""

import errno
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckpt.ranks import blank, equal, on_ranks, sample, shards, whole
from forge_ckpt.checkpoint import verification
from forge_ckpt.checkpoint.read import load, newest
from forge_ckpt.checkpoint.save import save
from forge_ckpt.store.local import LocalStore
from forge_ckpt.world import SingleProcessWorld
from forge_core.errors import CheckpointError

ALONE = SingleProcessWorld()
DAY = 86_400.0


class Blind:
    """A rank's view: files that come late or never, or as short as they were once."""

    def __init__(self, store: LocalStore, size: Callable[[str], int]) -> None:
        self.store, self.size = store, size

    def __getattr__(self, name: str):
        return getattr(self.store, name)


def absent(path: str) -> int:
    raise FileNotFoundError(path)


@pytest.mark.parametrize(("size", "sees"), [(absent, "nothing"), (lambda path: 3, "3 bytes")], ids=["never", "short"])
def test_fault_12_what_a_rank_does_not_see_in_time_is_said_and_not_taken_for_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, size: Callable[[str], int], sees: str
) -> None:
    monkeypatch.setattr(verification, "SECONDS", 0.1)
    for step in (100, 200):
        save(LocalStore(tmp_path), whole(sample(step)), {}, step, ALONE)

    def loading(world):
        store = LocalStore(tmp_path)
        view = Blind(store, size) if world.rank == 2 else store
        live = {name: torch.ones_like(tensor) for name, tensor in sample().items()}
        try:
            load(view, 200, whole(live), world)
        except CheckpointError as cause:
            return type(cause), str(cause), all(torch.equal(t, torch.ones_like(t)) for t in live.values())

    said = f"step-00000200 cannot be read: rank 2 sees {sees} of rank-00000.bin, rank 0"
    assert [(kind, text.startswith(said), same) for kind, text, same in on_ranks(3, loading)] == [
        (CheckpointError, True, True)
    ] * 3

    def starting(world):
        store = LocalStore(tmp_path)
        view = Blind(store, lambda path: size(path) if "200" in path else store.size(path)) if world.rank == 2 else store
        return newest(view, world)

    with caplog.at_level(logging.WARNING):
        found = on_ranks(3, starting)
    assert [f.step for f in found] == [100] * 3, found
    assert "rank 2 sees" in caplog.text
    assert (tmp_path / "step-00000200").is_dir(), "rank 0 sees it whole: it stays for the next start"


def test_fault_12_rank_0_commits_nothing_that_it_does_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the files of others, but not for ever; and all ranks know."""
    monkeypatch.setattr(verification, "SECONDS", 0.1)
    full = torch.arange(12.0).reshape(4, 3)

    def saving(world):
        store = LocalStore(tmp_path)
        view = Blind(store, lambda path: absent(path) if "rank-00001" in path else store.size(path))
        return save(view if world.rank == 0 else store, [shards("w", full, 0, 2)[world.rank]], {}, 1, world)

    results = on_ranks(2, saving)
    assert len({str(result) for result in results}) == 1 and isinstance(results[0], CheckpointError)
    assert "rank-00001.bin has None bytes on rank 0" in str(results[0])
    assert not list(tmp_path.glob("step-*"))


def test_fault_13_order_is_that_of_steps_whatever_clocks_and_files_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every save is by a node whose clock is a day before that of the save before it."""
    store = LocalStore(tmp_path)
    real = time.time
    for number, (step, seed) in enumerate([(9, 1), (10, 2), (100, 3), (100, 4)]):
        monkeypatch.setattr(time, "time", lambda behind=number * DAY: real() - behind)
        save(store, whole(sample(seed)), {"seed": seed}, step, ALONE, keep=2)
        (committed,) = (path for path in tmp_path.glob("step-*") if path.stat().st_mtime > real() - DAY / 2)
        for path in (*committed.iterdir(), committed):
            os.utime(path, (real() - (number + 1) * DAY,) * 2)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000010", "step-00000100-g2"], "the two newest"
    live = blank(sample())
    assert load(store, newest(store, ALONE) or 0, whole(live), ALONE) == {"seed": 4} and equal(live, sample(4))


def test_fault_15_a_linked_directory_is_resolved_once(tmp_path: Path) -> None:
    """A run directory is often a link to a scratch disk. What it leads to when the job starts is where the job writes."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    link = tmp_path / "run"
    link.symlink_to(tmp_path / "first")
    store = LocalStore(link / "checkpoints")
    save(store, whole(sample(1)), {}, 1, ALONE)
    link.unlink()
    link.symlink_to(tmp_path / "second")
    save(store, whole(sample(2)), {}, 2, ALONE)
    names = sorted(path.name for path in (tmp_path / "first/checkpoints").glob("step-*"))
    assert names == ["step-00000001", "step-00000002"] and not list((tmp_path / "second").iterdir())


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_fault_3_a_read_that_fails_once_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    store = LocalStore(tmp_path, pause=0.0)
    save(store, whole(sample(1)), {}, 1, ALONE)
    real, failed = os.preadv, []

    def once(*given) -> int:
        if not failed:
            failed.append(given)
            raise OSError(code, os.strerror(code))
        return real(*given)

    monkeypatch.setattr(os, "preadv", once)
    live = blank(sample())
    load(store, 1, whole(live), ALONE)
    assert failed and store.retries == 1 and equal(live, sample(1))
