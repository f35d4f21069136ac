"""Ranks that do not belong together never compute together (F1, F2): each test lets threads meet in one store, as ranks do."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forge_core.errors import ForgeError, LayoutError
from forge_parallel.launch import meeting, process_group
from forge_parallel.launch.environment import Launch
from forge_parallel.launch.meeting import Device, RanksDiffer, Wait, judged, meet
from forge_parallel.launch.watch import PeerFailure

SAME = {"optimizer.lr": "0.001", "train.max_steps": "6"}


class Rank(threading.Thread):
    """One process of a start; `found` is its error, or the name of the group that it got."""

    def __init__(self, store: dist.Store, rank: int, size: int = 2, content: Mapping[str, str] = SAME, **options: Any) -> None:
        super().__init__(daemon=True)
        self.store, self.where = store, Launch(rank, size, address="head", port=29, identity=options.pop("identity", ""))
        self.content, self.run_name, self.outlives = content, options.pop("run", "small"), options.pop("outlives", False)
        self.wait = Wait(
            self.where, options.pop("limit", 20.0), options.pop("patience", 30.0), options.pop("asked", lambda: False)
        )
        self.found: Any = None
        self.start()

    def run(self) -> None:
        try:
            device = torch.device("cpu")
            store, _ = meet(self.store, self.where, self.wait, device, self.content, self.run_name, self.outlives)
            self.found = store.get("name").decode()
        except ForgeError as error:
            self.found = error

    def end(self) -> Any:
        self.join(30)
        assert not self.is_alive(), "it hangs"
        return self.found


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    monkeypatch.setattr(meeting, "_FAULT_SECONDS", 1.0)
    monkeypatch.setattr(meeting, "_HURRY_SECONDS", 0.5)
    return dist.HashStore()


def test_ranks_that_run_the_same_thing_get_one_store(store: dist.Store) -> None:
    ranks = [Rank(store, rank, 5) for rank in (3, 1, 0, 2, 4)]
    assert len({rank.end() for rank in ranks}) == 1 and isinstance(ranks[0].found, str)


def test_trials_f1_what_differs_is_named_once_and_ends_all_ranks(store: dist.Store) -> None:
    other = SAME | {"optimizer.lr": "0.05", "trackers.0.api_key": '"(hidden)" #0123456789ab'}
    mine = SAME | {"trackers.0.api_key": '"(hidden)" #0123456789ac', "plugin": "a"}
    ranks = [Rank(store, 0, 3, mine), Rank(store, 1, 3, other), Rank(store, 2, 3, mine)]
    errors = [rank.end() for rank in ranks]
    assert len({str(error) for error in errors}) == 1
    assert all(isinstance(error, RanksDiffer) and error.exit_code == 2 for error in errors)
    said = str(errors[0])
    assert said.startswith("ranks differ: rank 1 (process ")
    assert "optimizer.lr is 0.05, and 0.001 on rank 0" in said and "plugin is not set, and a on rank 0" in said
    assert 'trackers.0.api_key is "(hidden)", and "(hidden)" on rank 0' in said and "#" not in said
    assert "max_steps" not in said and "rank 2" not in said and meeting.socket.gethostname() in said


def test_trials_f1_versions_and_variables_differ(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    there = meeting.surroundings()
    assert there["version of torch"] == torch.__version__ and there["environment NCCL_ALGO"] == "Ring"
    assert not any("IFNAME" in key for key in there), "a network card is a host's own"
    sides = [there, there | {"environment NCCL_ALGO": "Tree"}]
    monkeypatch.setattr(meeting, "surroundings", lambda: sides[int(threading.current_thread().where.rank)])
    first, second = Rank(store, 0, content={}), Rank(store, 1)  # one could not read its recipe: the rest is compared
    assert "environment NCCL_ALGO is Tree, and Ring on rank 0" in str(first.end()) == str(second.end())
    assert "optimizer" not in str(first.found)


def test_trials_f1_a_recipe_that_one_rank_could_not_read_is_not_compared(store: dist.Store) -> None:
    first, second = Rank(store, 0, content={}), Rank(store, 1)
    assert first.end() == second.end()


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (2, 8)])
def test_trials_f1_worlds_of_other_sizes(store: dist.Store, sizes: tuple[int, int]) -> None:
    began = time.monotonic()
    ranks = [Rank(store, rank, size) for rank, size in enumerate(sizes)]
    for rank in ranks:
        assert isinstance(rank.end(), RanksDiffer)
        assert f"was started for a world of {sizes[1]} processes, but rank 0 (process " in str(rank.found)
        assert str(rank.found).endswith(f"for one of {sizes[0]}")
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("kind", ["identity", "run"])
def test_trials_f2_a_rank_of_another_start_is_refused_alone(store: dist.Store, kind: str) -> None:
    mine, other = {kind: "SLURM job 77, step 0"}, {kind: "SLURM job 77, step 1"}
    stranger = Rank(store, 1, **other)
    ranks = [Rank(store, 0, **mine), Rank(store, 1, 2, **mine)]
    assert ranks[0].end() == ranks[1].end()
    refusal = stranger.end()
    assert isinstance(refusal, LayoutError)
    assert "SLURM job 77, step 0" in str(refusal) and "SLURM job 77, step 1" in str(refusal)


def test_trials_f2_a_rank_that_comes_after_the_start_is_refused(store: dist.Store) -> None:
    ranks = [Rank(store, rank, identity="SLURM job 77, step 0") for rank in range(2)]
    assert ranks[0].end() == ranks[1].end()
    late = Rank(store, 1, identity="SLURM job 77, step 1").end()
    assert isinstance(late, LayoutError) and "came too late" in str(late)
    assert "step 0" in str(late) and "step 1" in str(late)


def test_within_one_launch_another_name_is_a_difference_and_no_other_start(store: dist.Store) -> None:
    ranks = [Rank(store, rank, content={"job.name": f"run{rank}"}, identity="torchrun 7", run=f"run{rank}") for rank in range(2)]
    assert "job.name is run1, and run0 on rank 0" in str(ranks[0].end()) == str(ranks[1].end())


def test_trials_f2_every_rank_says_how_many_have_come_and_who_is_missing(
    store: dist.Store, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = [Rank(store, rank, 4, patience=1.0, limit=2.5) for rank in (0, 2)]
    assert [type(rank.end()) for rank in ranks] == [PeerFailure, PeerFailure]
    expected = "2 of 4 ranks have come; rank 1, 3 did not come to head:29"
    assert sum(expected in record.getMessage() for record in caplog.records) >= 2, "both of them say so"
    assert all(expected in str(rank.found) and rank.found.exit_code == 5 for rank in ranks)


@pytest.mark.parametrize("stopped", [0, 1])
def test_trials_f2_a_signal_ends_the_wait_of_all_who_are_there(store: dist.Store, stopped: int) -> None:
    began, asked = time.monotonic(), False

    def when(rank: int) -> Callable[[], bool]:
        return lambda: asked and rank == stopped

    ranks = [Rank(store, rank, 3, asked=when(rank)) for rank in range(2)]
    time.sleep(0.3)
    asked = True
    assert [rank.end().exit_code for rank in ranks] == [75, 75]
    assert all(f"rank {stopped} of 3" in str(rank.found) and "received a stop request" in str(rank.found) for rank in ranks)
    assert time.monotonic() - began < 8


def test_a_store_that_outlives_the_ranks_brings_nobody_to_the_dead(store: dist.Store) -> None:
    """Each start has other threads; the store of torchrun's agent still has the meetings of earlier ones."""
    lives = []
    for _ in range(3):
        guest = Rank(store, 1, outlives=True)  # finds the meeting of the life before
        time.sleep(0.2)
        host = Rank(store, 0, outlives=True)
        assert guest.end() == host.end()
        lives.append(host.found)
    assert len(set(lives)) == 3


def test_of_two_processes_with_one_rank_the_newer_one_counts(store: dist.Store) -> None:
    older = Rank(store, 1, 3)
    ranks = [Rank(store, 0, 3)]
    time.sleep(0.5)
    ranks += [Rank(store, 1, 3), Rank(store, 2, 3)]
    time.sleep(0.1)
    assert len({rank.end() for rank in ranks}) == 1
    assert "another process came as rank 1" in str(older.end())


def test_rank_0_takes_no_rank_that_its_world_lacks_nor_the_farewell_of_one_that_was_replaced() -> None:
    from types import SimpleNamespace
    from typing import Any

    import torch
    import torch.distributed as dist

    from forge_parallel.launch.meeting import Attendant, Device, _Host

    def attendant(rank: int, **more: Any) -> Attendant:
        return Attendant(rank, 2, "", "", "here", 7, Device.of("here", torch.device("cpu")), **more)

    def host() -> Any:
        wait: Any = SimpleNamespace(hurry=lambda seconds: None, where=SimpleNamespace(address="here", port=1))
        return _Host(dist.HashStore(), attendant(0), wait, outlives=False)

    for rank in (2, -1, 0):
        one = host()
        one.welcome(attendant(rank))
        assert one.fault is not None and "was started for a world of 2" in one.fault[0]
    one = host()
    one.welcome(attendant(1, number="second"))
    one.welcome(attendant(1, number="first", left="it was stopped", code=75))
    assert one.fault is None
    one.welcome(attendant(1, number="second", left="it was stopped", code=75))
    assert one.fault is not None and "has left: it was stopped" in one.fault[0] and one.fault[1] == 75


GIB = 1 << 30
H100 = Device("one", "cuda", "NVIDIA H100", "9.0", 80 * GIB)
H200 = Device("two", "cuda", "NVIDIA H200", "9.0", 141 * GIB)
A100 = Device("two", "cuda", "NVIDIA A100", "8.0", 80 * GIB)
CPU = Device("two", "cpu", "cpu")


def test_equal_devices_are_nothing_to_speak_of() -> None:
    assert judged([H100] * 3) == judged([CPU, Device("three", "cpu", "cpu")]) == judged([H100]) == ("", "")
    nearly = Device("one", "cuda", "NVIDIA H100", "9.0", 80 * GIB - GIB)
    assert judged([H100, nearly]) == ("", ""), "error correction takes some memory"


def test_a_rank_without_a_gpu_among_ranks_with_one_is_named() -> None:
    fault, remark = judged([H100, H100, CPU])
    assert fault == (
        "ranks have devices of different kinds: ranks 0-1 have NVIDIA H100 of 9.0 80.00 GiB (one), rank 2 has cpu (two); "
        "`forge-train doctor` on two says why torch uses no GPU there"
    )
    assert remark == ""


def test_other_capabilities_are_refused() -> None:
    fault, _ = judged([H100, A100, H100])
    assert "different capabilities: ranks 0, 2 have NVIDIA H100 of 9.0 80.00 GiB (one), rank 1 has NVIDIA A100 of 8.0" in fault
    assert "CUDA_VISIBLE_DEVICES" in fault


def test_other_memory_is_told_of() -> None:
    fault, remark = judged([H100, H200])
    assert (
        fault == "" and "rank 0 has NVIDIA H100 of 9.0 80.00 GiB (one), rank 1 has NVIDIA H200 of 9.0 141.00 GiB (two)" in remark
    )
    slice_of_it = Device("one", "cuda", "NVIDIA H100", "9.0", 40 * GIB)
    assert "the smallest memory counts" in judged([H100, slice_of_it])[1]


def test_many_ranks_are_named_in_few_words() -> None:
    fault, _ = judged([H100 if rank % 2 else A100 for rank in range(64)])
    assert "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 24 more have NVIDIA A100" in fault


def test_one_process_asks_nobody() -> None:
    assert process_group.init_process_groups(Launch(), timeout=1) == torch.device("cpu")
