"""Several ranks, one outcome: nobody commits alone, nobody waits for ever, rank 0's view counts."""

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ckpt.ranks import ThreadRank, blank, digest, equal, on_ranks, sample, shards, whole
from forge_ckpt.checkpoint.read import load, newest
from forge_ckpt.checkpoint.retention import retain
from forge_ckpt.checkpoint.save import save
from forge_ckpt.store.local import LocalStore
from forge_ckpt.world import ProcessGroupWorld, SingleProcessWorld
from forge_core.errors import CheckpointError
from forge_core.protocols.checkpoint import Piece

FULL = torch.arange(24 * 5, dtype=torch.float32).reshape(24, 5)


class FailsAt:
    """A probe that raises from the given occurrence of an operation on, while `armed`."""

    def __init__(self, operation: str, part: str, code: int, skip: int = 0) -> None:
        self.operation, self.part, self.code, self.skip = operation, part, code, skip

    def __call__(self, operation: str, path: str) -> None:
        if operation == self.operation and self.part in path:
            self.skip -= 1
            if self.skip < 0:
                raise OSError(self.code, os.strerror(self.code))


def saved(root: Path, step: int, ranks: int = 3, bad_rank: int = -1, probe=None, pieces=None, keep: int = 0, meta=None):
    """Every rank's directory name or error."""

    def saving(world):
        mine = [shards("w", FULL + step, 0, ranks)[world.rank]]
        options = {}
        if world.rank == bad_rank:
            mine = pieces(mine) if pieces else mine
            options = {"probe": probe} if probe else {}
        return save(LocalStore(root, pause=0.0, **options), mine, meta or {"step": step}, step, world, keep=keep)

    return on_ranks(ranks, saving)


def raising(pieces: list[Piece]) -> Iterator[Piece]:
    yield from pieces
    raise RuntimeError("a model that cannot be walked")


FAILURES = {
    "pieces": (1, {"pieces": raising}, "rank 1: RuntimeError: a model that cannot be walked"),
    "no space at create": (
        1,
        {"probe": FailsAt("create", "rank-", errno.ENOSPC)},
        "rank 1: no space left: needs 160 B, free",
    ),
    "no space in a shard": (
        2,
        {"probe": FailsAt("write", "rank-", errno.ENOSPC)},
        "rank 2: no space left: needs 160 B, free",
    ),
    "quota at fsync": (0, {"probe": FailsAt("fsync", "rank-", errno.EDQUOT)}, "rank 0: no space left"),
    "no space in the manifest": (0, {"probe": FailsAt("write", "manifest", errno.ENOSPC)}, "rank 0: no space left"),
    "disk gone at the commit": (0, {"probe": FailsAt("rename", "-> step-", errno.EIO)}, "rank 0: OSError"),
    "disk gone before": (0, {"probe": FailsAt("create", "rank-", errno.EROFS)}, "rank 0: OSError"),
    "uncovered": (
        1,
        {"pieces": lambda mine: [Piece(p.name, p.shape, p.offset, p.local, False) for p in mine]},
        "40 of 120 elements",
    ),
    "dtype": (
        1,
        {"pieces": lambda mine: [Piece(p.name, p.shape, p.offset, p.local.double(), True) for p in mine]},
        "ranks disagree",
    ),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_fault_2_and_7_a_failing_rank_fails_all_and_costs_nothing(tmp_path: Path, kind: str) -> None:
    rank, how, message = FAILURES[kind]
    assert saved(tmp_path / "c", 100) == ["step-00000100"] * 3
    before = {path: path.read_bytes() for path in (tmp_path / "c").rglob("*") if path.is_file()}
    results = saved(tmp_path / "c", 200, bad_rank=rank, **how)
    assert all(isinstance(result, CheckpointError) for result in results), results
    assert len({str(result) for result in results}) == 1
    assert message in str(results[0]) and "earlier checkpoints are unchanged" in str(results[0])
    assert {path: path.read_bytes() for path in (tmp_path / "c").rglob("*") if path.is_file()} == before
    assert not [path for path in (tmp_path / "c").iterdir() if path.name.startswith(".")]
    assert saved(tmp_path / "c", 200) == ["step-00000200"] * 3


def test_fault_2_too_little_space_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalStore, "free", lambda self: 100)
    results = saved(tmp_path / "c", 100)
    assert {str(result) for result in results} == {
        "the checkpoint of step 100 was not saved: rank 0: no space left: needs 480 B, free 100 B; "
        "earlier checkpoints are unchanged"
    }
    assert not list((tmp_path / "c").glob(".saving*"))


def test_a_fault_after_the_commit_does_not_undo_it(tmp_path: Path) -> None:
    for step in (1, 2):
        saved(tmp_path / "c", step)
    probe = FailsAt("rename", "-> latest", errno.EACCES)
    assert saved(tmp_path / "c", 3, bad_rank=0, probe=probe, keep=1) == ["step-00000003"] * 3
    probe = FailsAt("unlink", ".removed", errno.EACCES)
    assert saved(tmp_path / "c", 4, bad_rank=0, probe=probe, keep=1) == ["step-00000004"] * 3
    found = newest(LocalStore(tmp_path / "c"), SingleProcessWorld())
    assert found is not None and found.step == 4


@pytest.mark.parametrize(("operation", "skip"), [("create", 0), ("write", 0), ("write", 3), ("fsync", 0)])
def test_fault_3_a_transient_fault_in_the_middle_of_a_save_passes(tmp_path: Path, operation: str, skip: int) -> None:
    faults = [FailsAt(operation, "rank-", errno.EIO, skip)]

    def probe(name: str, path: str) -> None:
        for fault in list(faults):
            try:
                fault(name, path)
            except OSError:
                faults.clear()
                raise

    store = LocalStore(tmp_path / "c", probe=probe, pause=0.0)
    save(store, whole(sample()), {}, 1, SingleProcessWorld())
    assert not faults and store.retries == 1
    live = blank(sample())
    load(store, 1, whole(live), SingleProcessWorld())
    assert equal(live, sample())


def test_ranks_at_different_steps_are_refused(tmp_path: Path) -> None:
    def saving(world):
        return save(LocalStore(tmp_path / "c"), [shards("w", FULL, 0, 2)[world.rank]], {}, 10 + world.rank, world)

    assert all("different steps" in str(result) for result in on_ranks(2, saving))


def test_nothing_is_removed_for_the_sake_of_a_bad_checkpoint(tmp_path: Path) -> None:
    for step in (100, 200, 300):
        saved(tmp_path / "c", step)
    store = LocalStore(tmp_path / "c")
    for step in (200, 300):
        file = tmp_path / f"c/step-00000{step}/rank-00002.bin"
        file.write_bytes(b"x" + file.read_bytes()[1:])
    for keep in (1, 2):
        assert on_ranks(3, lambda world, keep=keep: retain(store, world, keep)) == [[]] * 3
    assert on_ranks(3, lambda world: retain(store, world, 3)) == [[]] * 3
    found = newest(store, SingleProcessWorld())
    assert found is not None and found.step == 100
    saved(tmp_path / "c", 400)
    assert on_ranks(3, lambda world: retain(store, world, 1)) == [["step-00000100"]] * 3


class LateView:
    """A rank whose network file system shows nothing of a directory at first, and a stale listing always."""

    def __init__(self, store: LocalStore) -> None:
        self.store, self.hidden = store, 5

    def __getattr__(self, name: str):
        return getattr(self.store, name)

    def list(self, path: str = "") -> list[str]:
        return ["step-00000777"]

    def size(self, path: str) -> int:
        self.hidden -= 1
        if self.hidden > 0:
            raise FileNotFoundError(path)
        return self.store.size(path)


def test_fault_12_rank_0_decides_what_there_is_and_others_wait_for_it(tmp_path: Path) -> None:
    saved(tmp_path / "c", 100)

    def starting(world):
        store = LocalStore(tmp_path / "c")
        view = LateView(store) if world.rank else store
        found = newest(view, world)
        live = torch.zeros_like(FULL)
        load(view, found, whole({"w": live}), world)
        return found.name, torch.equal(live, FULL + 100)

    assert on_ranks(2, starting) == [("step-00000100", True)] * 2


class Counting(LocalStore):
    """Counts the bytes that are read."""

    count = 0

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        self.count += len(buffer) if path.endswith(".bin") else 0
        super().read_into(path, offset, buffer)


def test_ranks_share_the_verification(tmp_path: Path) -> None:
    state = {f"t{i}": torch.randn(100, 10 + i) for i in range(20)}
    save(LocalStore(tmp_path / "c"), whole(state), {}, 1, SingleProcessWorld())
    total = sum(t.numel() * 4 for t in state.values())

    def searching(world):
        store = Counting(tmp_path / "c")
        newest(store, world)
        return store.count

    counts = on_ranks(4, searching)
    assert sum(counts) == total and max(counts) < 0.35 * total


def test_an_unreadable_checkpoint_is_passed_over_but_not_renamed(tmp_path: Path) -> None:
    for step in (1, 2):
        saved(tmp_path / "c", step)

    class Broken(LocalStore):
        def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
            if "step-00000002/rank" in path:
                raise OSError(errno.EIO, "Input/output error")
            super().read_into(path, offset, buffer)

    found = on_ranks(2, lambda world: newest(Broken(tmp_path / "c"), world))
    assert [f.step for f in found] == [1, 1] and "Input/output" in found[0].skipped[0].reason
    assert (tmp_path / "c/step-00000002").is_dir()


def over_gloo(root: str) -> tuple[list[bytes], bytes, bool, str]:
    world = ProcessGroupWorld()
    state = sample()
    pieces = [shards(name, tensor, 0, world.size)[world.rank] for name, tensor in state.items() if tensor.dim()]
    payload = bytes([world.rank]) * (3 * world.rank)
    save(LocalStore(root), pieces, {"size": world.size}, 3, world)
    found = newest(LocalStore(root), world, "require")
    live = blank({name: tensor for name, tensor in state.items() if tensor.dim()})
    assert found is not None
    load(LocalStore(root), found, whole(live), world)
    same = equal(live, {name: state[name] for name in live})
    return world.all_gather(payload), world.broadcast(b"x\0y" if world.rank == 0 else None), same, digest(list(live.values()))


def gathered_over_gloo() -> list[list[bytes]]:
    world = ProcessGroupWorld()
    longest_first, longest_last = bytes(99 - world.rank), bytes([world.rank]) * 3 * world.rank
    return [world.gather(payload) for payload in (longest_first, longest_last, b"")]


def test_a_process_group_gathers_on_rank_0_only(world) -> None:
    first, *others = world.run(gathered_over_gloo, 3, timeout=60)
    assert first == [[bytes(99), bytes(98), bytes(97)], [b"", b"\1" * 3, b"\2" * 6], [b"", b"", b""]]
    assert others == [[[], [], []]] * 2


@dataclass
class Receiving(ThreadRank):
    """A rank that counts the bytes that it receives from the others."""

    received: int = 0

    def all_gather(self, payload: bytes) -> list[bytes]:
        every = super().all_gather(payload)
        self.received += sum(map(len, every))
        return every

    def gather(self, payload: bytes) -> list[bytes]:
        before = self.received
        every = super().gather(payload)
        self.received = before + sum(map(len, every[1:]))
        if every:
            lengths = [len(payload) for payload in every[1:]]
            assert max(lengths) - min(lengths) <= 2, "rank 0 has the names, and sends nothing"
        return every

    def broadcast(self, payload: bytes | None) -> bytes:
        before = self.received
        found = super().broadcast(payload)
        self.received = before + len(found)
        return found


def test_a_save_sends_what_all_ranks_say_to_rank_0_only(tmp_path: Path) -> None:
    """More ranks are more for rank 0, and the same for each other one."""

    def received(size: int) -> list[int]:
        state = {f"t{number}": torch.zeros(64, 8) for number in range(20)}

        def body(world: ThreadRank) -> int:
            rank = Receiving(world.rank, world.size, world.meeting)
            pieces = [shards(name, tensor, 0, size)[rank.rank] for name, tensor in state.items()]
            save(LocalStore(tmp_path / str(size)), pieces, {}, 1, rank)
            return rank.received

        return on_ranks(size, body)

    small, large = received(4), received(32)
    assert len(set(small[1:])) == len(set(large[1:])) == 1
    assert large[1] == small[1] < 1000
    table = 20 * (8 + 2 * 16 + 16)  # index, offset and extent in two dimensions, checksum
    assert 28 * table < large[0] - small[0] < 28 * (table + 300)


def test_over_a_process_group(world, tmp_path: Path) -> None:
    results = world.run(over_gloo, 2, str(tmp_path / "c"), timeout=60)
    assert results[0] == results[1] == ([b"", b"\1\1\1"], b"x\0y", True, results[0][3])
