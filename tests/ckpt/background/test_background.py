"""Saves in the background: what is saved is the state of the call, and what fails fails alike on all ranks."""

import mmap
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from ckpt.background.stores import Closed, Told, Unsendable
from ckpt.ranks import Meeting, ThreadRank, blank, box, equal, on_ranks, sample, whole
from forge_ckpt import background as module
from forge_ckpt.background import BackgroundSaves, Busy, SaveResult, SaverProcess
from forge_ckpt.checkpoint.fence import Fence
from forge_ckpt.checkpoint.read import load, newest
from forge_ckpt.checkpoint.save import save
from forge_ckpt.checkpoint.write import SaveRequest
from forge_ckpt.store.local import LocalStore
from forge_ckpt.world import SingleProcessWorld
from forge_core.errors import CheckpointError

ALONE = SingleProcessWorld()
Kind = Literal["process", "thread"]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A saver imports the stores of these tests."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


@pytest.fixture
def opened() -> Iterator[Callable[..., BackgroundSaves]]:
    made: list[BackgroundSaves] = []

    def background(store: Any, **settings: Any) -> BackgroundSaves:
        made.append(BackgroundSaves(store, ALONE, ALONE, **settings))
        return made[-1]

    yield background
    for each in made:
        each.close()


def loaded(store: Any) -> tuple[int, dict[str, torch.Tensor]]:
    found = newest(store, ALONE)
    assert found is not None
    live = blank(sample())
    load(store, found, whole(live), ALONE)
    return found.step, live


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


@pytest.mark.parametrize("by", ["process", "thread"])
def test_fault_8_training_moves_on_while_the_state_of_the_call_is_written(
    tmp_path: Path, opened: Callable[..., BackgroundSaves], by: Kind
) -> None:
    store, state = Told(tmp_path), sample(1)
    background = opened(store, by=by)
    background.reserve(whole(state))
    (tmp_path / "gate").touch()
    meta = {"tokens": 5, "hooks": [{"seen": [1, 2]}]}
    assert background.save(whole(state), SaveRequest(100, meta))
    assert background.settled() == []
    for tensor in state.values():
        tensor.zero_()
    meta["hooks"][0]["seen"].append(3)  # type: ignore[index]
    (tmp_path / "gate").unlink()
    (outcome,) = background.settled(wait=True)
    assert outcome[:3] == (100, "step-00000100", None), outcome.error
    assert background.settled(wait=True) == []
    step, found = loaded(store)
    assert step == 100 and equal(found, sample(1))
    kept = newest(store, ALONE)
    assert kept is not None and kept.meta == {"tokens": 5, "hooks": [{"seen": [1, 2]}]}


def test_the_files_are_those_of_a_save_that_waits(tmp_path: Path, opened: Callable[..., BackgroundSaves]) -> None:
    one, other = LocalStore(tmp_path / "one"), LocalStore(tmp_path / "other")
    for step in (1, 2, 3):
        save(one, whole(sample(step)), {"seed": step}, step, ALONE, keep=2, spare=[1], marks={"best": 2})
    background = opened(other)
    for step in (1, 2, 3):
        assert background.save(whole(sample(step)), SaveRequest(step, {"seed": step}, 2, [1], {"best": 2}))
    assert [outcome.name for outcome in background.settled(wait=True)] == ["step-00000001", "step-00000002", "step-00000003"]
    files = [sorted(path.relative_to(store.root) for path in store.root.rglob("*") if path.is_file()) for store in (one, other)]
    assert files[0] == files[1]
    for path in files[0]:
        if path.name != "manifest.json":  # it has a random generation
            assert (one.root / path).read_bytes() == (other.root / path).read_bytes(), path


@pytest.mark.parametrize("by", ["process", "thread"])
def test_ranks_save_together(tmp_path: Path, by: Kind) -> None:
    full = torch.arange(35.0).reshape(7, 5)
    apart = Meeting(2)

    def rank(world: ThreadRank) -> list[SaveResult]:
        background = BackgroundSaves(LocalStore(tmp_path), world, ThreadRank(world.rank, 2, apart), by=by)
        low, high = ((0, 0), (4, 5)) if world.rank == 0 else ((4, 0), (7, 5))
        for step in (1, 2):
            assert background.save([box("t", full * step, low, high)], SaveRequest(step, {}))
        outcomes = background.settled(wait=True)
        background.close()
        return outcomes

    one, other = on_ranks(2, rank)
    assert [outcome[:3] for outcome in one] == [outcome[:3] for outcome in other]
    assert [outcome.name for outcome in one] == ["step-00000001", "step-00000002"]
    live = torch.zeros(7, 5)
    load(LocalStore(tmp_path), "step-00000002", whole({"t": live}), ALONE)
    assert torch.equal(live, full * 2)


def test_an_outcome_is_given_when_all_ranks_have_it(tmp_path: Path) -> None:
    apart = Meeting(2)

    def rank(world: ThreadRank) -> list[list[SaveResult]]:
        background = BackgroundSaves(LocalStore(tmp_path), world, ThreadRank(world.rank, 2, apart), by="thread")
        early = SaveResult(1, "step-00000001", None, 0.0)
        if world.rank == 1:
            background._outcomes.append(early)
        found = [background.settled()]
        if world.rank == 0:
            background._outcomes.append(early)
        found += [background.settled(), background.settled()]
        background.close()
        return found

    for found in on_ranks(2, rank):
        assert [len(outcomes) for outcomes in found] == [0, 1, 0]


class Late(SaverProcess):
    """Its process dies when all has been done, before it says so."""

    def _supervise(self, *given: Any) -> dict[str, str]:
        super()._supervise(*given)
        assert self.process is not None
        self.process.kill()
        raise EOFError


def test_fault_7_a_saver_that_dies_after_the_commit_leaves_it_open_on_all_ranks(tmp_path: Path) -> None:
    full, apart = torch.arange(35.0).reshape(7, 5), Meeting(2)

    def rank(world: ThreadRank) -> list[SaveResult]:
        store, other = LocalStore(tmp_path), ThreadRank(world.rank, 2, apart)
        background = BackgroundSaves(store, world, other)
        if world.rank == 1:
            background._process = Late(store, other, background._memories)
        low, high = ((0, 0), (4, 5)) if world.rank == 0 else ((4, 0), (7, 5))
        background.save([box("t", full, low, high)], SaveRequest(1, {}))
        outcomes = background.settled(wait=True)
        background.close()
        return outcomes

    for (outcome,) in on_ranks(2, rank):
        assert outcome.name is None and "rank 1: its saver was killed by SIGKILL" in (outcome.error or "")


@pytest.mark.parametrize("by", ["process", "thread"])
@pytest.mark.parametrize("fault", ["full", "kill"])
def test_fault_7_a_failure_on_one_rank_is_one_failed_save_on_all(tmp_path: Path, by: Kind, fault: str) -> None:
    if (by, fault) == ("thread", "kill"):
        return  # the process that dies would be that of the tests
    full = torch.arange(35.0).reshape(7, 5)
    apart = Meeting(2)
    told = tmp_path / f"{fault}-1"
    told.touch()

    def rank(world: ThreadRank) -> list[SaveResult]:
        background = BackgroundSaves(Told(tmp_path), world, ThreadRank(world.rank, 2, apart), by=by)
        low, high = ((0, 0), (4, 5)) if world.rank == 0 else ((4, 0), (7, 5))
        background.save([box("t", full, low, high)], SaveRequest(1, {}))
        outcomes = background.settled(wait=True)
        told.unlink(missing_ok=True)
        world.all_gather(b"")
        background.save([box("t", full, low, high)], SaveRequest(2, {}))
        outcomes += background.settled(wait=True)
        background.close()
        return outcomes

    one, other = on_ranks(2, rank)
    assert [outcome[:3] for outcome in one] == [outcome[:3] for outcome in other]
    failed, good = one
    what = {"full": "no space left", "kill": "rank 1: its saver was killed by SIGKILL"}[fault]
    assert failed.name is None and what in (failed.error or "") and "step 1 was not saved" in (failed.error or "")
    assert good.name == "step-00000002"
    assert sorted(Told(tmp_path).list()) == ["forge-checkpoints", "latest", "step-00000002"]


def test_fault_10_a_saver_that_dies_is_noticed_and_the_next_save_has_a_new_one(
    tmp_path: Path, opened: Callable[..., BackgroundSaves]
) -> None:
    store = Told(tmp_path)
    background = opened(store)
    background.save(whole(sample(1)), SaveRequest(1, {}))
    background.settled(wait=True)
    (tmp_path / "gate").touch()
    background.save(whole(sample(2)), SaveRequest(2, {}))
    until((tmp_path / "waiting").exists)
    process = background._process
    assert process is not None and process.process is not None
    process.process.kill()
    (outcome,) = background.settled(wait=True)
    assert outcome.name is None and "killed by SIGKILL" in (outcome.error or "")
    (tmp_path / "gate").unlink()
    assert loaded(store)[0] == 1
    background.save(whole(sample(3)), SaveRequest(3, {}))
    assert background.settled(wait=True)[0].name == "step-00000003"
    process.process.kill()  # between two saves
    process.process.wait()
    background.save(whole(sample(4)), SaveRequest(4, {}))
    assert background.settled(wait=True)[0].name == "step-00000004"
    assert equal(loaded(store)[1], sample(4))


@pytest.mark.parametrize("stride", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_fault_1_the_saver_is_killed_before_an_operation(
    tmp_path: Path, opened: Callable[..., BackgroundSaves], stride: int
) -> None:
    before, total = 1, None
    for point in range(1, 200, stride):
        (tmp_path / "at").unlink(missing_ok=True)
        store = Told(tmp_path)
        if point == 1:
            save(store, whole(sample(1)), {}, 1, ALONE, keep=1)
        background = opened(Told(tmp_path))
        (tmp_path / "at").write_text(str(point))
        background.save(whole(sample(before + 1)), SaveRequest(before + 1, {}, keep=1))
        (outcome,) = background.settled(wait=True)
        background.close()
        (tmp_path / "at").unlink()
        step, found = loaded(LocalStore(tmp_path / "store"))
        assert step in (before, before + 1) and equal(found, sample(step)), point
        if outcome.name is not None:
            assert step == before + 1
            total = point
            break
        before = step
    assert total is not None and total > 15


@pytest.mark.parametrize(("busy", "saved"), [("wait", [1, 2, 3, 4]), ("skip", [1]), ("queue", [1, 2])])
def test_fault_9_storage_that_is_slower_than_the_interval(
    tmp_path: Path, opened: Callable[..., BackgroundSaves], busy: Busy, saved: list[int]
) -> None:
    (tmp_path / "gate").touch()
    background = opened(Told(tmp_path), busy=busy)
    for step in (1, 2, 3, 4):
        if busy == "wait" and step == 2:
            (tmp_path / "gate").unlink()
        assert background.save(whole(sample(step)), SaveRequest(step, {})) == (step in saved)
    (tmp_path / "gate").unlink(missing_ok=True)
    assert [outcome.step for outcome in background.settled(wait=True)] == saved
    assert len(background._memories) == (2 if busy == "queue" else 1)
    assert equal(loaded(Told(tmp_path))[1], sample(saved[-1]))


def test_a_job_that_lost_its_store_writes_nothing_more(tmp_path: Path, opened: Callable[..., BackgroundSaves]) -> None:
    store = LocalStore(tmp_path)
    background = opened(store, fence=Fence.take(store, ALONE))
    Fence.take(store, ALONE)
    background.save(whole(sample()), SaveRequest(1, {}))
    (outcome,) = background.settled(wait=True)
    assert outcome.name is None and "has taken over" in (outcome.error or "") and newest(store, ALONE) is None


@pytest.mark.parametrize(
    ("kind", "expected"), [(Unsendable, "its saver could not be started"), (Closed, "belongs to one process")]
)
def test_a_store_that_only_this_process_can_use(
    tmp_path: Path, opened: Callable[..., BackgroundSaves], kind: type[LocalStore], expected: str
) -> None:
    background = opened(kind(tmp_path / "process"))
    background.save(whole(sample()), SaveRequest(1, {}))
    assert expected in (background.settled(wait=True)[0].error or "")
    threaded = opened(kind(tmp_path / "thread"), by="thread")
    threaded.save(whole(sample()), SaveRequest(1, {}))
    assert threaded.settled(wait=True)[0].name == "step-00000001"


def test_what_cannot_be_saved_is_an_outcome(tmp_path: Path, opened: Callable[..., BackgroundSaves]) -> None:
    background = opened(LocalStore(tmp_path))
    background.save(whole({"t": torch.zeros(2, device="meta")}), SaveRequest(1, {}))
    background.save(whole(sample()), SaveRequest(2, {"what": object()}))
    background.save(whole(sample()), SaveRequest(-3, {}))
    background.save(whole(sample()), SaveRequest(4, {}))
    errors = [outcome.error for outcome in background.settled(wait=True)]
    for error, expected in zip(errors[:3], ["meta", "object", "step must be"], strict=True):
        assert expected in (error or "")
    assert errors[3] is None


def test_too_little_memory_is_said_before_training(
    tmp_path: Path, opened: Callable[..., BackgroundSaves], monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = sum(tensor.numel() * tensor.element_size() for tensor in sample().values())
    monkeypatch.setattr(module, "available_memory", lambda: 2 * needed - 1)
    opened(LocalStore(tmp_path)).reserve(whole(sample()))
    with pytest.raises(CheckpointError, match=r"of memory left.*mode = 'sync', or checkpoint.busy = 'wait'"):
        opened(LocalStore(tmp_path), busy="queue").reserve(whole(sample()))
    monkeypatch.setattr(module, "available_memory", lambda: None)
    opened(LocalStore(tmp_path)).reserve(whole(sample()))
    with pytest.raises(CheckpointError, match=r"rank 0: .*meta"):
        opened(LocalStore(tmp_path)).reserve(whole({"t": torch.zeros(2, device="meta")}))


def test_memory_is_used_again(tmp_path: Path, opened: Callable[..., BackgroundSaves]) -> None:
    background = opened(LocalStore(tmp_path))
    held = []
    for step, rows in enumerate((10, 1000, 500, 1000), start=1):
        background.save(whole({"t": torch.full((rows, 10), float(step))}), SaveRequest(step, {}))
        assert background.settled(wait=True)[0].error is None
        held.append(os.fstat(background._memories[0].descriptor).st_size)
        live = torch.zeros(rows, 10)
        load(LocalStore(tmp_path), step, whole({"t": live}), ALONE)
        assert (live == step).all()
    assert held[1:] == [40_000] * 3


@pytest.mark.skipif(not hasattr(mmap, "MAP_POPULATE"), reason="this system maps pages when they are touched")
def test_the_first_copy_finds_its_pages_there(tmp_path: Path, opened: Callable[..., BackgroundSaves]) -> None:
    """Otherwise each page that it touches is a fault of the memory, and the first wait of a run is several times the others."""
    state = whole({"t": torch.ones(1 << 22)})
    background = opened(LocalStore(tmp_path))
    background.reserve(state)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    background.save(state, SaveRequest(1, {}))
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < (1 << 24) / resource.getpagesize() / 4


PARENT = """
import sys, time
from pathlib import Path
from ckpt.background.stores import Told
from ckpt.ranks import sample, whole
from forge_ckpt.background import BackgroundSaves
from forge_ckpt.world import SingleProcessWorld
from forge_ckpt.checkpoint.write import SaveRequest

background = BackgroundSaves(Told(Path(sys.argv[1])), SingleProcessWorld(), SingleProcessWorld())
background.save(whole(sample(1)), SaveRequest(1, {}))
while background._process is None or background._process.process is None:
    time.sleep(0.005)
print(background._process.process.pid, flush=True)
time.sleep(60)
"""


def test_a_saver_gives_way_to_training(tmp_path: Path, opened: Callable[..., BackgroundSaves]) -> None:
    background = opened(LocalStore(tmp_path), by="process")
    background.save(whole(sample(1)), SaveRequest(1, {}))
    assert background.settled(wait=True)[0].error is None
    assert background._process is not None and background._process.process is not None
    mine, its = (os.getpriority(os.PRIO_PROCESS, pid) for pid in (0, background._process.process.pid))
    assert its == min(19, mine + 5)


def test_a_saver_ignores_signals_and_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "gate").touch()
    with subprocess.Popen([sys.executable, "-c", PARENT, tmp_path], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            saver = int(parent.stdout.readline())
            until(lambda: (tmp_path / "waiting").exists())
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
                os.kill(saver, number)
            time.sleep(0.1)
            os.kill(saver, 0)
        finally:
            parent.kill()
    (tmp_path / "gate").unlink()

    def gone() -> bool:
        status = Path(f"/proc/{saver}/stat")
        return not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"

    until(gone)
    # Alone it needs nobody's agreement, so what it had is there; what it was not told is not.
    assert LocalStore(tmp_path / "store").list()
    found = newest(LocalStore(tmp_path / "store"), ALONE)
    assert found is None or found.step == 1
