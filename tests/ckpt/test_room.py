"""Room for checkpoints, asked before a run: one must fit, and what the rules keep is said where it does not."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.ranks import on_ranks, shards, whole
from forge_ckpt.checkpoint.save import check_room, save
from forge_ckpt.components import Checkpoint
from forge_ckpt.format.names import committed
from forge_ckpt.store.local import LocalStore
from forge_ckpt.world import SingleProcessWorld
from forge_core.errors import CheckpointError
from forge_core.terminal import size

ALONE = SingleProcessWorld()
FULL = torch.zeros(1 << 18, 4)
ONE = 4 << 20
"""Bytes of it: 2^18 * 4 numbers of 4 bytes."""


class Small(LocalStore):
    """Has so many bytes left."""

    def __init__(self, path: Path, left: int | None) -> None:
        super().__init__(path)
        self.left = left

    def free(self) -> int | None:
        return self.left


@pytest.mark.parametrize("ranks", [1, 3])
def test_fault_15_a_disk_with_no_room_for_one_is_refused_on_every_rank(tmp_path: Path, ranks: int) -> None:
    def look(left: int) -> Any:
        return lambda world: check_room(Small(tmp_path, left), [shards("w", FULL, 0, ranks)[world.rank]], world, 0)

    refused = on_ranks(ranks, look(ONE - 1))
    assert {type(found) for found in refused} == {CheckpointError}
    assert len({str(found) for found in refused}) == 1
    assert f"one checkpoint takes 4.00 MiB, but {tmp_path} has 4.00 MiB left" in str(refused[0])
    assert on_ranks(ranks, look(ONE)) == [""] * ranks
    assert list(tmp_path.iterdir()) == [], "nothing was written"


@pytest.mark.parametrize(("there", "keep", "fits"), [(0, 3, 4), (2, 3, 2), (3, 3, 1), (5, 3, 1), (0, 0, 1)])
def test_fault_15_what_retention_will_hold_is_compared_with_what_is_left(
    tmp_path: Path, there: int, keep: int, fits: int
) -> None:
    for step in range(there):
        save(LocalStore(tmp_path), whole({"w": torch.zeros(2)}), {}, step, ALONE)
    assert check_room(Small(tmp_path, fits * ONE), whole({"w": FULL}), ALONE, keep) == ""
    if fits > 1:
        said = check_room(Small(tmp_path, fits * ONE - 1), whole({"w": FULL}), ALONE, keep)
        assert f"up to {size(fits * ONE)} more: {fits} of {size(ONE)}" in said and "checkpoint.keep" in said


def test_a_store_that_cannot_tell_is_not_asked(tmp_path: Path) -> None:
    assert check_room(Small(tmp_path, None), whole({"w": FULL}), ALONE, 9) == ""


def test_fault_15_a_limit_on_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, refused in ((ONE - 1, True), (ONE, False)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, limit=limit: (limit, limit))
        if not refused:
            assert check_room(Small(tmp_path, ONE), whole({"w": FULL}), ALONE, 0) == ""
            continue
        with pytest.raises(CheckpointError, match=r"rank 0 writes a file of 4.00 MiB .* may write 4.00 MiB.*ulimit -f"):
            check_room(Small(tmp_path, ONE), whole({"w": FULL}), ALONE, 0)


def test_state_that_cannot_be_saved_is_named_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the state cannot be saved: rank 0: w: "):
        check_room(Small(tmp_path, ONE), whole({"w": torch.zeros(2, device="meta")}), ALONE, 0)


@pytest.mark.parametrize(
    "rules",
    [
        Checkpoint(every=10, keep=3),
        Checkpoint(every=10, keep=0, first=True),
        Checkpoint(every=0),
        Checkpoint(every=7, keep=1, keep_every=14, keep_log_spaced=0),
        Checkpoint(every=30, keep=5),
    ],
)
def test_what_will_be_kept_is_what_a_run_keeps(tmp_path: Path, rules: Checkpoint) -> None:
    """The largest number that is on the disk after any save of a run of 100 steps."""
    store, most = LocalStore(tmp_path), 0
    steps = [step for step in range(0 if rules.first else 1, 100) if step == 0 or (rules.every and step % rules.every == 0)]
    for step in [*steps, 100]:
        save(store, whole({"w": torch.zeros(2)}), {}, step, ALONE, keep=rules.policy())
        most = max(most, len(committed(store.list())))
    assert rules.most_kept(100) == most


def test_a_run_without_an_end_is_counted_at_once() -> None:
    """Never fewer than a run keeps, and no list of all its saves: one of 10^9 filled 10 GB."""
    for rules in (
        Checkpoint(every=4),
        Checkpoint(every=4, keep=2, keep_every=6, first=True),
        Checkpoint(every=4, keep=1, keep_log_spaced=0),
    ):
        few, saves = rules.most_kept(4 * 10_000), 10_001
        more = rules.most_kept(4 * saves)
        assert few <= more <= few + 6
        assert rules.most_kept(10**12) < 10**12
    assert Checkpoint(every=4).most_kept(10**12) == 3
    assert Checkpoint(every=4, keep=0).most_kept(10**12) >= 10**12 // 4


def test_a_limit_on_files_is_of_the_file_of_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (ONE // 2, ONE // 2))
    pieces = shards("w", FULL, 0, 2)
    assert on_ranks(2, lambda world: check_room(Small(tmp_path, ONE), [pieces[world.rank]], world, 0)) == ["", ""]
