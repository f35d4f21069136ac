"""Damage is found before any live tensor changes, and a start never goes on without saying so."""

import errno
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import xxhash
from typer.testing import CliRunner

from ckpt.ranks import blank, digest, equal, on_ranks, sample, shards, whole
from forge_ckpt.checkpoint.fence import Fence
from forge_ckpt.checkpoint.read import load, newest
from forge_ckpt.checkpoint.save import save
from forge_ckpt.commands import app
from forge_ckpt.store.local import LocalStore
from forge_ckpt.world import SingleProcessWorld
from forge_core.errors import CheckpointError, Damaged, NewerFormat


class Bomb:
    def __init__(self, sentinel: Path) -> None:
        self.sentinel = sentinel

    def __reduce__(self):
        return (Path.touch, (self.sentinel,))


def full(seed: int) -> torch.Tensor:
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))


def two_checkpoints(root: Path) -> LocalStore:
    """Steps 100 and 200, each written by two ranks: rank files of 8 KiB."""
    store = LocalStore(root)
    for step in (100, 200):

        def saving(world, step=step):
            save(store, [shards("w", full(step), 0, 2)[world.rank]], {"step": step}, step, world)

        on_ranks(2, saving)
    return store


def change(file: Path, at: int, data: bytes) -> None:
    content = bytearray(file.read_bytes())
    content[at : at + len(data)] = data
    file.write_bytes(content)


def flip(file: Path, at: int) -> None:
    change(file, at, bytes([file.read_bytes()[at] ^ 1]))


def swap(one: Path, other: Path) -> None:
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def pickled(file: Path) -> None:
    file.write_bytes(pickle.dumps(Bomb(file.parent.parent.parent / "executed")))


def linked(file: Path) -> None:
    file.rename(file.parent.parent.parent / "elsewhere")
    file.symlink_to(file.parent.parent.parent / "elsewhere")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "first byte flipped": lambda d: flip(d / "rank-00000.bin", 0),
    "last byte flipped": lambda d: flip(d / "rank-00001.bin", 8191),
    "page zeroed": lambda d: change(d / "rank-00001.bin", 4096, bytes(4096)),
    "truncated": lambda d: os.truncate(d / "rank-00000.bin", 8191),
    "emptied": lambda d: os.truncate(d / "rank-00000.bin", 0),
    "longer": lambda d: change(d / "rank-00000.bin", 8192, b"x"),
    "shards swapped": lambda d: swap(d / "rank-00000.bin", d / "rank-00001.bin"),
    "shard missing": lambda d: (d / "rank-00001.bin").unlink(),
    "stale shard": lambda d: shutil.copy(d.parent / "step-00000100/rank-00000.bin", d),
    "stale manifest": lambda d: shutil.copy(d.parent / "step-00000100/manifest.json", d),
    "manifest missing": lambda d: (d / "manifest.json").unlink(),
    "manifest emptied": lambda d: os.truncate(d / "manifest.json", 0),
    "manifest truncated": lambda d: os.truncate(d / "manifest.json", 200),
    "manifest flipped": lambda d: flip(d / "manifest.json", 150),
    "pickle as manifest": lambda d: pickled(d / "manifest.json"),
    "pickle as shard": lambda d: pickled(d / "rank-00000.bin"),
    "link as shard": lambda d: linked(d / "rank-00000.bin"),
    "link as manifest": lambda d: linked(d / "manifest.json"),
    "pipe as shard": lambda d: ((d / "rank-00000.bin").unlink(), os.mkfifo(d / "rank-00000.bin")),
    "directory as shard": lambda d: ((d / "rank-00000.bin").unlink(), (d / "rank-00000.bin").mkdir()),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_fault_4_and_5_damage_is_found_before_a_tensor_changes_and_the_older_one_is_taken(tmp_path: Path, kind: str) -> None:
    store = two_checkpoints(tmp_path / "c")
    DAMAGE[kind](tmp_path / "c/step-00000200")

    def starting(world):
        mine = shards("w", torch.full((64, 64), 7.0), 1, 2)[world.rank]
        before = digest([mine.local])
        try:
            load(store, 200, [mine], world)
        except Damaged as cause:
            assert digest([mine.local]) == before
            message = str(cause)
        else:
            raise AssertionError("damage was loaded")
        found = newest(store, world)
        assert found is not None
        assert load(store, found, [mine], world) == {"step": 100}
        assert torch.equal(mine.local, shards("w", full(100), 1, 2)[world.rank].local)
        return message, found.name, found.skipped

    results = on_ranks(2, starting)
    assert results[0] == results[1] and not isinstance(results[0], Exception), results
    _, name, skipped = results[0]
    assert name == "step-00000100"
    assert [entry.name for entry in skipped] == ["damaged-step-00000200"] and skipped[0].reason
    assert (tmp_path / "c/damaged-step-00000200").is_dir()  # put aside, not deleted
    assert not (tmp_path / "executed").exists()


def test_fault_5_found_by_newest_and_damaged_before_load(tmp_path: Path) -> None:
    store, state = LocalStore(tmp_path / "c"), sample()
    save(store, whole(state), {}, 1, SingleProcessWorld())
    found = newest(store, SingleProcessWorld())
    assert found is not None
    flip(tmp_path / "c/step-00000001/rank-00000.bin", 3)
    live = {name: torch.ones_like(t) for name, t in state.items()}
    before = digest(list(live.values()))
    with pytest.raises(Damaged, match=r"rank-00000.bin.*checksum"):
        load(store, found, whole(live), SingleProcessWorld())
    assert digest(list(live.values())) == before


def test_a_weights_only_load_does_not_care_about_other_bytes(tmp_path: Path) -> None:
    store, state = LocalStore(tmp_path / "c"), sample()
    save(store, whole(state), {}, 1, SingleProcessWorld())
    size = sum(state[name].numel() * state[name].element_size() for name in state if name.startswith("model/"))
    flip(tmp_path / "c/step-00000001/rank-00000.bin", size)
    weights = blank({name: t for name, t in state.items() if name.startswith("model/")})
    load(store, 1, whole(weights), SingleProcessWorld(), strict=False)
    assert equal(weights, {name: state[name] for name in weights})
    with pytest.raises(Damaged):
        load(store, 1, whole(blank(state)), SingleProcessWorld())


def test_fault_5_every_flipped_bit_of_a_manifest_is_found(tmp_path: Path) -> None:
    from forge_ckpt.format.codec import decode

    save(LocalStore(tmp_path / "c"), whole({"t": torch.ones(2)}), {"a": 1}, 1, SingleProcessWorld())
    data = (tmp_path / "c/step-00000001/manifest.json").read_bytes()
    assert decode(data).step == 1
    for at in range(len(data)):
        with pytest.raises(Damaged):
            decode(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with pytest.raises(Damaged):
            decode(data[:at])


def test_fault_23_all_damaged_stops_the_run_now_and_at_the_next_start(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "c")
    save(store, whole(sample()), {}, 1, SingleProcessWorld())
    flip(tmp_path / "c/step-00000001/rank-00000.bin", 3)
    for _ in range(2):  # the second start sees only what the first one put aside
        for policy in ("auto", "require"):
            with pytest.raises(CheckpointError, match="no usable checkpoint"):
                newest(store, SingleProcessWorld(), policy)
    assert newest(store, SingleProcessWorld(), "never") is None


def test_fault_23_a_history_that_was_only_left_behind_does_not_start_over_silently(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "c")
    save(store, whole(sample()), {}, 1, SingleProcessWorld())
    store.rename("step-00000001", "superseded-step-00000001")
    with pytest.raises(CheckpointError, match="superseded-step-00000001: left behind"):
        newest(store, SingleProcessWorld())


def test_fault_23_nothing_there(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "c")
    assert newest(store, SingleProcessWorld()) is None
    with pytest.raises(CheckpointError, match="check the run's directory"):
        newest(store, SingleProcessWorld(), "require")
    with pytest.raises(CheckpointError, match="no checkpoint found in"):
        load(store, 5, [], SingleProcessWorld())
    assert not (tmp_path / "c").exists()  # looking creates nothing


def test_fault_25_a_newer_format_is_named_and_left_where_it_is(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "c")
    save(store, whole(sample()), {}, 1, SingleProcessWorld())
    file = tmp_path / "c/step-00000001/manifest.json"
    rest = file.read_bytes().split(b"\n", 1)[1].replace(b'"version":1', b'"version":2')
    file.write_bytes(b'{"seal": "' + xxhash.xxh3_128_hexdigest(rest).encode() + b'",\n' + rest)
    for call in (lambda: newest(store, SingleProcessWorld()), lambda: load(store, 1, whole(sample()), SingleProcessWorld())):
        with pytest.raises(NewerFormat, match="format version 2"):
            call()
    assert "step-00000001" in store.list()


def test_tombstones_and_half_saves_are_not_loadable(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "c")
    save(store, whole(sample()), {}, 1, SingleProcessWorld())
    for name in (".removed-step-00000002", ".saving-step-00000003-x", "damaged-step-00000004", "step-5", "step-00000006.tmp"):
        shutil.copytree(tmp_path / "c/step-00000001", tmp_path / "c" / name)
    found = newest(store, SingleProcessWorld())
    assert found is not None and found.step == 1 and found.skipped == ()


class FailsAt(LocalStore):
    """A store whose reads fail from the k-th one on, once it is armed."""

    left: int | None = None

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        if self.left is not None and path.endswith(".bin"):
            self.left -= 1
            if self.left < 0:
                raise OSError(errno.EIO, "Input/output error")
        super().read_into(path, offset, buffer)


@pytest.mark.parametrize("reads", range(6))
def test_fault_24_reads_that_fail_while_tensors_are_filled(tmp_path: Path, reads: int) -> None:
    """The verification has passed, then one rank cannot read its k-th tensor: no rank goes on, and another load mends all."""
    names = [f"t{index}" for index in range(6)]
    for step in (1, 2):
        state = {name: full(10 * step + index) for index, name in enumerate(names)}
        save(LocalStore(tmp_path / "c"), whole(state), {"step": step}, step, SingleProcessWorld())

    def loading(world):
        store = FailsAt(tmp_path / "c", pause=0.0)
        live = {name: torch.full((64, 64), 7.0) for name in names}
        found = newest(store, world)
        armed = LocalStore(tmp_path / "c") if world.rank == 0 else store
        if world.rank == 1:
            store.left = 3 + reads  # of six pieces it verifies three
        try:
            load(armed, found, whole(live), world)
        except CheckpointError as cause:
            message = str(cause)
        else:
            raise AssertionError("a load that failed was taken for one that did not")
        filled = [name for index, name in enumerate(names) if torch.equal(live[name], full(20 + index))]
        assert load(LocalStore(tmp_path / "c"), 1, whole(live), world) == {"step": 1}
        mended = equal(live, {name: full(10 + index) for index, name in enumerate(names)})
        return message, len(filled), mended

    results = on_ranks(2, loading)
    said = "step-00000002 was verified, but could not be read on rank 1: OSError"
    assert all(not isinstance(result, Exception) for result in results), results
    assert all(message.startswith(said) and "load a checkpoint again before you use them" in message for message, _, _ in results)
    assert results[1][1] == reads, "the tensors before it were filled: that is what the message is about"
    assert [mended for _, _, mended in results] == [True, True]


def test_fault_45_a_pickle_in_any_file_executes_nothing(tmp_path: Path) -> None:
    two_checkpoints(tmp_path / "c")
    save(LocalStore(tmp_path / "c"), whole({"w": full(300)}), {}, 300, SingleProcessWorld())
    Fence.take(LocalStore(tmp_path / "c"), SingleProcessWorld())
    files = sorted(path.relative_to(tmp_path / "c") for path in (tmp_path / "c").rglob("*") if path.is_file())
    assert {path.name for path in files} >= {"latest", "owner", "forge-checkpoints", "manifest.json", "rank-00001.bin"}
    for file in files:
        copy = shutil.copytree(tmp_path / "c", tmp_path / "one")
        (copy / file).write_bytes(pickle.dumps(Bomb(tmp_path / "executed")))
        store = LocalStore(copy)
        found = newest(store, SingleProcessWorld())
        assert found is not None and (found.step == 300) == ("300" not in str(file))
        load(store, found, whole({"w": torch.zeros(64, 64)}), SingleProcessWorld())
        for command in ("show", "verify"):
            CliRunner().invoke(app, [command, str(copy)])
        shutil.rmtree(copy)
        assert not (tmp_path / "executed").exists(), file
