"""Frozen tensors are stored once: later checkpoints have the same file under a name of their own, and each is whole."""

import errno
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ckpt.ranks import Meeting, ThreadRank, blank, digest, equal, on_ranks, sample, shards, whole
from forge_ckpt.background import BackgroundSaves
from forge_ckpt.checkpoint.read import StoredTensors, VerifiedCheckpoint, load, newest
from forge_ckpt.checkpoint.save import check_room, save
from forge_ckpt.checkpoint.verification import agreed_fault, open_manifest
from forge_ckpt.checkpoint.write import SaveRequest
from forge_ckpt.commands import app
from forge_ckpt.store.local import LocalStore
from forge_ckpt.world import SingleProcessWorld
from forge_core.errors import CheckpointError
from forge_core.protocols.checkpoint import Piece
from forge_core.terminal import size

ALONE = SingleProcessWorld()
TOWER = torch.randn(64, 32, generator=torch.Generator().manual_seed(9))
BYTES = 64 * 32 * 4


class Counting(LocalStore):
    """Counts the bytes that are written, but for manifests, marks and such."""

    written = 0

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        super().write(path, chunks)
        self.written += self.size(path) if path.endswith(".bin") else 0


def state(seed: int = 0, tower: torch.Tensor = TOWER, frozen: bool = True) -> list[Piece]:
    """What is trained, with the tower in the middle of it."""
    mine = whole(sample(seed))
    return [*mine[:2], replace(whole({"model/tower": tower})[0], frozen=frozen), *mine[2:]]


def loaded(store: LocalStore, found: VerifiedCheckpoint | None = None) -> dict[str, torch.Tensor]:
    found = found or newest(store, ALONE)
    assert found is not None
    live = blank({**sample(), "model/tower": TOWER})
    load(store, found, whole(live), ALONE)
    return live


def files(path: Path) -> dict[str, os.stat_result]:
    return {file.name: file.stat() for file in sorted(path.glob("*.bin"))}


def test_only_what_moves_is_written_again(tmp_path: Path) -> None:
    store = Counting(tmp_path)
    one = save(store, state(1), {}, 1, ALONE)
    first, rest = store.written, store.written - BYTES
    two = save(store, state(2), {}, 2, ALONE)
    assert store.written == first + rest
    before, after = files(tmp_path / one), files(tmp_path / two)
    assert before.keys() == after.keys() and len(after) == 2
    (name,) = (name for name in after if name != "rank-00000.bin")
    assert after[name].st_ino == before[name].st_ino and after[name].st_size == BYTES
    assert after["rank-00000.bin"].st_ino != before["rank-00000.bin"].st_ino
    assert equal(loaded(store), {**sample(2), "model/tower": TOWER})
    assert open_manifest(store, two)[0].bytes == rest + BYTES, "a manifest is of the whole"


def test_each_checkpoint_stays_whole_when_others_go(tmp_path: Path) -> None:
    store = Counting(tmp_path)
    for step in (1, 2, 3):
        name = save(store, state(step), {}, step, ALONE, keep=1)
    assert [entry for entry in store.list() if entry.startswith("step")] == [name]
    assert {stat.st_nlink for stat in files(tmp_path / name).values()} == {1}
    assert equal(loaded(store), {**sample(3), "model/tower": TOWER})


def test_bytes_decide_and_not_what_is_said(tmp_path: Path) -> None:
    """A tower that moved is written although it is called frozen; then again one that is as the newest checkpoint has it."""
    store = Counting(tmp_path)
    save(store, state(1), {}, 1, ALONE)
    moved, before = TOWER.clone(), store.written
    moved[63, 31] += 1
    save(store, state(1, moved), {}, 2, ALONE)
    assert store.written - before == before
    assert torch.equal(loaded(store)["model/tower"], moved)
    save(store, state(1, moved), {}, 3, ALONE)
    assert store.written - 2 * before == before - BYTES


def test_what_is_trained_again_is_saved_again(tmp_path: Path) -> None:
    store = Counting(tmp_path)
    save(store, state(1), {}, 1, ALONE)
    first = store.written
    name = save(store, state(1, TOWER + 1, frozen=False), {}, 2, ALONE)
    assert store.written == 2 * first and [*files(tmp_path / name)] == ["rank-00000.bin"]
    assert torch.equal(loaded(store)["model/tower"], TOWER + 1)


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOENT])
def test_a_disk_without_links_gets_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refused(*given: Any, **more: Any) -> None:
        raise OSError(code, "no link")

    monkeypatch.setattr(os, "link", refused)
    store = Counting(tmp_path)
    for step in (1, 2):
        name = save(store, state(step), {}, step, ALONE)
    assert {stat.st_nlink for stat in files(tmp_path / name).values()} == {1}
    assert equal(loaded(store), {**sample(2), "model/tower": TOWER})


def test_another_fault_of_a_link_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*given: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    store = LocalStore(tmp_path)
    one = save(store, state(1), {}, 1, ALONE)
    monkeypatch.setattr(os, "link", refused)
    with pytest.raises(CheckpointError, match="step 2 was not saved: rank 0: no space left"):
        save(store, state(2), {}, 2, ALONE)
    assert [name for name in store.list() if name.startswith(("step", "."))] == [one]


class Bucket:
    """A store without links."""

    def __init__(self, store: LocalStore) -> None:
        for name in ("write", "read", "read_into", "size", "free", "rename", "list", "remove"):
            setattr(self, name, getattr(store, name))


def test_a_store_that_knows_no_links_has_one_file_for_each_rank(tmp_path: Path) -> None:
    store = Counting(tmp_path)
    plain: Any = Bucket(store)
    for step in (1, 2):
        name = save(plain, state(step), {}, step, ALONE)
    assert [*files(tmp_path / name)] == ["rank-00000.bin"]
    assert equal(loaded(store), {**sample(2), "model/tower": TOWER})


def test_damage_of_a_shared_file_is_seen_in_every_checkpoint_that_has_it(tmp_path: Path) -> None:
    """And the next save does not take it from them."""
    store = Counting(tmp_path)
    names = [save(store, state(step), {}, step, ALONE) for step in (1, 2)]
    (shared,) = (name for name in files(tmp_path / names[0]) if name != "rank-00000.bin")
    with (tmp_path / names[0] / shared).open("r+b") as file:
        file.seek(100)
        byte = file.read(1)
        file.seek(100)
        file.write(bytes([byte[0] ^ 1]))
    for name in names:
        assert "model/tower" in str(agreed_fault(store, name, open_manifest(store, name)[0], ALONE))
    with pytest.raises(CheckpointError):
        newest(store, ALONE)
    save(store, state(3), {}, 3, ALONE)
    assert equal(loaded(store), {**sample(3), "model/tower": TOWER})


def test_a_shared_file_that_is_cut_short_is_written_again(tmp_path: Path) -> None:
    store = Counting(tmp_path)
    one = save(store, state(1), {}, 1, ALONE)
    (shared,) = (name for name in files(tmp_path / one) if name != "rank-00000.bin")
    os.truncate(tmp_path / one / shared, BYTES - 1)
    two = save(store, state(2), {}, 2, ALONE)
    assert agreed_fault(store, two, open_manifest(store, two)[0], ALONE) is None


def test_a_link_is_durable_when_it_returns(tmp_path: Path) -> None:
    done: list[tuple[str, str]] = []
    store = LocalStore(tmp_path, probe=lambda operation, path: done.append((operation, path)))
    store.write("one/data.bin", [b"1"])
    done.clear()
    assert store.link("one/data.bin", "two/data.bin")
    assert done == [("mkdir", "two"), ("link", "one/data.bin -> two/data.bin"), ("fsync", "two")]


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    store = Counting(tmp_path / "run")
    one = save(store, state(1), {}, 1, ALONE)
    (shared,) = (name for name in files(tmp_path / "run" / one) if name != "rank-00000.bin")
    place = tmp_path / "run" / one / shared
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    assert not store.link(f"{one}/{shared}", ".saving-x/file.bin")
    two = save(store, state(2), {}, 2, ALONE)
    assert not (tmp_path / "run" / two / shared).is_symlink()
    assert agreed_fault(store, two, open_manifest(store, two)[0], ALONE) is None


def test_ranks_have_files_of_their_own_and_other_ranks_write_them_again(tmp_path: Path) -> None:
    store = Counting(tmp_path)

    def on(count: int, step: int) -> str:
        def one(world: ThreadRank) -> str:
            mine = [shards(name, tensor, 0, count)[world.rank] for name, tensor in sample(step).items() if tensor.dim()]
            count_of = replace(whole({"optimizer/step": torch.tensor(step)})[0], owned=world.rank == 0)
            tower = replace(shards("model/tower", TOWER, 0, count)[world.rank], frozen=True)
            return save(store, [tower, count_of, *mine], {}, step, world)

        return on_ranks(count, one)[0]

    names = [on(2, 1), on(2, 2), on(3, 3)]
    one, two, three = (files(tmp_path / name) for name in names)
    shared = [name for name in two if len(name) > len("rank-00000.bin")]
    assert len(shared) == 2 and {name[:10] for name in shared} == {"rank-00000", "rank-00001"}
    assert all(one[name].st_ino == two[name].st_ino for name in shared)
    assert {stat.st_nlink for stat in three.values()} == {1} and len(three) == 6
    assert torch.equal(loaded(store)["model/tower"], TOWER)


@pytest.mark.parametrize("by", ["process", "thread"])
def test_saves_in_the_background_share_too(tmp_path: Path, by: Any) -> None:
    store = LocalStore(tmp_path)
    saves = BackgroundSaves(store, ALONE, ThreadRank(0, 1, Meeting(1)), by=by)
    try:
        for step in (1, 2):
            assert saves.save(state(step), SaveRequest(step, {}))
            assert [outcome.error for outcome in saves.settled(wait=True)] == [None]
    finally:
        saves.close()
    one, two = (files(tmp_path / name) for name in store.list() if name.startswith("step"))
    assert {name == "rank-00000.bin": one[name].st_ino == two[name].st_ino for name in one} == {True: False, False: True}
    assert equal(loaded(store), {**sample(2), "model/tower": TOWER})


def test_a_checkpoint_of_nothing_but_frozen_tensors(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    pieces = [replace(piece, frozen=True) for piece in whole(sample(1))]
    names = [save(store, pieces, {}, step, ALONE) for step in (1, 2)]
    one, two = (files(tmp_path / name) for name in names)
    assert len(two) == 1 and {stat.st_nlink for stat in two.values()} == {2} and one.keys() == two.keys()
    live = blank(sample())
    found = newest(store, ALONE)
    assert found is not None
    load(store, found, whole(live), ALONE)
    assert digest(list(live.values())) == digest(list(sample(1).values()))


def test_room_is_asked_for_frozen_tensors_once(tmp_path: Path) -> None:
    class Small(LocalStore):
        left = 0

        def free(self) -> int | None:
            return self.left

    store = Small(tmp_path)
    whole_size = sum(piece.local.numel() * piece.local.element_size() for piece in state())
    needed = BYTES + 3 * (whole_size - BYTES)
    store.left = needed
    assert check_room(store, state(), ALONE, keep=2) == ""
    store.left -= 1
    said = check_room(store, state(), ALONE, keep=2)
    assert f"up to {size(needed)} more: 3 of {size(whole_size)}, {size(BYTES)} of it stored once" in said


def test_a_save_needs_room_only_for_what_it_writes(tmp_path: Path) -> None:
    class Full(LocalStore):
        left: int | None = None

        def free(self) -> int | None:
            return self.left

    store = Full(tmp_path)
    save(store, state(1), {}, 1, ALONE)
    store.left = sum(piece.local.numel() * piece.local.element_size() for piece in state()) - BYTES
    save(store, state(2), {}, 2, ALONE)
    store.left -= 1
    with pytest.raises(CheckpointError, match="no space left"):
        save(store, state(3), {}, 3, ALONE)


def test_commands_take_such_checkpoints(tmp_path: Path) -> None:
    """`ckpt verify`, `show`, `average` and `prune`; what stays is whole."""
    store = LocalStore(tmp_path / "run")
    for step in (1, 2):
        save(store, state(step), {"config": {"model": {}}}, step, ALONE)

    def ran(*arguments: object) -> str:
        done = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert done.exit_code == 0, done.output
        return done.output

    for step in (1, 2):
        assert "is verified" in ran("verify", store.root, step)
    assert "model/tower" in ran("show", store.root)
    ran("average", store.root, 1, 2, "--output", tmp_path / "mean")
    opened = StoredTensors(LocalStore(tmp_path / "mean"), "step-00000002")
    assert torch.equal(opened.whole("model/tower"), TOWER)
    ran("prune", store.root, "--last", 1, "--yes")
    assert [name for name in store.list() if name.startswith("step")] == ["step-00000002"]
    assert "is verified" in ran("verify", store.root)
    assert equal(loaded(store), {**sample(2), "model/tower": TOWER})
