"""What a start and the watch ask of the store: constant for each rank, linear for rank 0 (benchmarks/parallel/rendezvous.py)."""

import json
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

from forge_core.errors import LayoutError
from forge_parallel.launch import process_group
from forge_parallel.launch.environment import Launch
from forge_parallel.launch.hang_report import several
from forge_parallel.launch.large_store import Turn, absent, pause_of, put, values
from forge_parallel.launch.watch import Watch
from forge_train.process.ranks import StartAgreement

BENCHMARKS = Path(__file__).parents[3] / "benchmarks" / "parallel"


@pytest.fixture(scope="module")
def rendezvous() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield import_module("rendezvous")
        sys.modules.pop("rendezvous")


WORLDS = (16, 64, 256)


def test_another_rank_asks_the_same_in_every_world_and_rank_0_at_most_linearly(rendezvous: ModuleType) -> None:
    counted = {world: dict(rendezvous.rows(world)) for world in WORLDS}
    assert len(counted[16]) == 7
    for what in counted[16]:
        others = {world: (found[what]["another"].total, found[what]["another"].keys) for world, found in counted.items()}
        assert len(set(others.values())) == 1, (what, others)
        assert others[16][0] <= 8
        sizes = [counted[world][what]["another"].bytes for world in WORLDS]
        assert max(sizes) < 1.1 * min(sizes), "but for the digits of its number"
    linear = {"meeting": 3, "look, all wait": 2, "look, all have waited for 30 s": 1, "look, all have waited for 600 s": 1}
    for what, keys in linear.items():
        first = [counted[world][what]["rank 0"] for world in WORLDS]
        slopes = [(b.keys - a.keys) / (y - x) for a, b, x, y in zip(first, first[1:], WORLDS, WORLDS[1:], strict=False)]
        assert slopes == [keys] * 2, what
        assert all(store.total <= 12 for store in first), "in calls of many keys"
    for what in ("phase of the start", "look"):
        assert len({counted[world][what]["rank 0"].total for world in WORLDS}) == 1, what


def test_a_simulated_meeting_and_phase_ask_what_64_threads_ask(rendezvous: ModuleType) -> None:
    simulated, threads = rendezvous.meeting(64), rendezvous.meeting_of_threads(64)
    assert simulated["rank 0"].keys == threads[0].keys
    for store in threads[1:]:
        late = store.calls["check"] - simulated["another"].calls["check"]  # rank 0 may close the meeting between two checks
        assert 0 <= late <= 1
        assert store.calls - rendezvous.Counter(check=late) == simulated["another"].calls
    simulated, threads = rendezvous.phase(64), rendezvous.phase_of_threads(64)
    last = {store.calls["set"] for store in threads}
    assert last == {1, 2}, "the last one to come says so"
    assert sum(store.total for store in threads) == 64 * simulated["rank 0"].total + 1


def test_gloo_asks_for_the_address_of_every_rank(rendezvous: ModuleType) -> None:
    """This is torch's; the page on large worlds names it."""
    for world in (4, 8):
        assert {store.total for store in rendezvous.gloo(world)} == {2 * world + 1}


class Counted(dict[str, str]):
    """A store of a set of keys that counts checks."""

    checks = 0

    def check(self, keys: list[str]) -> bool:
        self.checks += 1
        return all(key in self for key in keys)


@pytest.mark.parametrize("missing", [(), (0,), (4999,), (7, 8, 1023, 1024, 4998)])
def test_absent_keys_are_found_with_few_calls(missing: tuple[int, ...]) -> None:
    keys = [f"k{number}" for number in range(5000)]
    store = Counted({key: "" for number, key in enumerate(keys) if number not in missing})
    assert absent(store, keys) == [keys[number] for number in missing]
    assert store.checks <= 5 + 2 * 11 * len(missing)
    assert absent(store, keys, 2) == [keys[number] for number in missing[:2]]
    assert absent(store, []) == []


def test_the_first_absent_keys_of_many_take_few_calls() -> None:
    store = Counted()
    keys = [f"k{number}" for number in range(5000)]
    assert absent(store, keys, 8) == keys[:8]
    assert store.checks < 40


def test_many_values_are_written_and_read_in_calls_of_at_most_1024() -> None:
    sizes: list[int] = []

    class Parts(dist.Store):
        inner = dist.HashStore()

        def multi_set(self, keys: list[str], texts: list[Any]) -> None:
            sizes.append(len(keys))
            self.inner.multi_set(keys, texts)

        def multi_get(self, keys: list[str]) -> list[bytes]:
            sizes.append(len(keys))
            return self.inner.multi_get(keys)

    store = Parts()
    entries = [(f"k{number}", str(number)) for number in range(2050)]
    put(store, entries)
    assert values(store, [key for key, _ in entries]) == [text.encode() for _, text in entries]
    assert sizes == [1024, 1024, 2] * 2


def test_polls_of_large_worlds_are_further_apart() -> None:
    assert pause_of(2, 0.5) == pause_of(5000, 0.5) == 0.5
    assert pause_of(65536, 0.5) == pytest.approx(6.5536)
    assert Watch(0, 9000, patience=30.0)._interval == 1.0 and Watch(0, 20000, patience=30.0)._interval == pytest.approx(2.0)


def test_one_rank_at_a_time_has_the_turn_and_loses_it_by_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    store = dist.HashStore()
    first, second, third = (Turn(store, "turn", rank, 3.0) for rank in range(3))
    assert first.mine() and first.mine()
    assert not second.mine() and not third.mine()
    now += 2.9
    assert first.mine(), "it renews it, and the others see that"
    now += 2.9
    assert not second.mine() and not third.mine()
    now += 3.1
    assert second.mine() and not third.mine() and not first.mine(), "the first to ask after the silence"
    now += 1.0
    assert second.mine()
    third.leave()
    assert not first.mine(), "who does not have it cannot leave it"
    second.leave()
    assert third.mine() and not second.mine()


def waiting(monkeypatch: pytest.MonkeyPatch, seconds: float, *watches: Watch) -> None:
    """Lets watches see their training threads wait, each for so many seconds."""
    for watch in watches:
        told, status = watch._told, Watch._sight(watch)._replace(waits=True, seconds=seconds, where="fit")
        watch._told = told  # it is the same wait
        monkeypatch.setattr(watch, "_sight", lambda status=status: status)


def test_of_all_that_wait_one_reads_and_all_say_for_whom(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    store = dist.HashStore()
    watches = [Watch(rank, 8, store, patience=1.0) for rank in range(8)]
    readings = [0] * 8
    for watch in watches:
        sights = watch._sights

        def read(watch: Watch = watch, sights: Callable[[], Any] = sights) -> Any:
            readings[watch.rank] += 1
            return sights()

        monkeypatch.setattr(watch, "_sights", read)
    for seconds in (0.6, 0.9, 1.2):
        waiting(monkeypatch, seconds, *watches[:6])
        for watch in watches[:7]:  # rank 7 is silent
            assert watch._look() is None
        now += 0.3
    assert readings == [3, 0, 0, 0, 0, 0, 0, 0]
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["waiting for 1 s in the start, fit, for rank 7 (no status received)"] * 6


def test_a_rank_does_not_wait_for_itself_and_the_number_of_others_is_right(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    store = dist.HashStore()
    watches = [Watch(rank, 8, store, patience=1.0) for rank in range(8)]
    for seconds in (0.6, 0.9, 1.2):
        waiting(monkeypatch, seconds, *watches)
        for watch in watches:
            assert watch._look() is None
        now += 0.3
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 8
    for rank, line in enumerate(lines):
        named = [other for other in range(5) if other != rank][:4]
        assert [f"rank {other} (" in line for other in named] == [True] * 4 and f"rank {rank} (" not in line
        assert line.endswith(f", and {3 if rank < 5 else 4} more ranks")


def test_who_gives_up_first_leaves_the_note_and_the_others_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    watches = [Watch(rank, 3, store, patience=1.0, timeout=5.0) for rank in range(3)]
    for watch in watches:
        watch._look()
    waiting(monkeypatch, 6.0, *watches[:2])
    monkeypatch.setattr(watches[1], "_sights", lambda: pytest.fail("it reads the others, too"))
    assert watches[0]._giving_up.mine() and watches[0]._reading.mine()
    assert watches[1]._look() is None, "another one is about to leave the note"
    said = watches[0]._look()
    assert said is not None and said.startswith("rank 2 (") and said.endswith("did not come within 5 s")
    assert watches[1]._look() == said


def test_who_looks_for_the_cause_first_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    watches = [Watch(rank, 4, store, patience=2.0) for rank in range(4)]
    for watch in watches:
        watch._look()
    for watch in watches[1:3]:
        monkeypatch.setattr(watch, "_sights", lambda: pytest.fail("it reads the others, too"))
    broken, said = RuntimeError("gloo: Connection closed by peer"), list[str]()
    alive = threading.Event()

    def beat() -> None:
        while not alive.wait(0.02):
            for watch in watches[1:3]:
                watch._beat += 1
                store.set(f"rank/{watch.rank}", json.dumps(watch._sight()))

    threads = [
        threading.Thread(target=beat),
        *(threading.Thread(target=lambda w=w: said.append(str(w.explain(broken)))) for w in watches[:3]),
    ]
    for thread in threads[:2]:
        thread.start()
    while not store.check(["turn/cause"]):
        time.sleep(0.001)
    for thread in threads[2:]:
        thread.start()
    for thread in threads[1:]:
        thread.join(20)
    alive.set()
    assert len(said) == 3 and all(line.startswith("rank 3 (") and "ended without a message" in line for line in said)


def test_ranks_that_fail_together_learn_it_from_a_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    watches = [Watch(rank, 3, store, patience=0.5) for rank in range(3)]
    monkeypatch.setattr(threading.Thread, "is_alive", lambda _: True)
    results: dict[int, Any] = {}
    for watch in watches[:2]:
        watch._look()
    threads = [threading.Thread(target=lambda w=w: results.__setitem__(w.rank, w.failed_in(4))) for w in watches[:2]]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    assert results == {}, "rank 2 has neither failed nor gone on"
    watches[2].calls = 5
    watches[2]._look()
    for thread in threads:
        thread.join(20)
    assert results == {0: False, 1: False}
    assert not watches[0].all_fail(9, 0.05) and not watches[0].all_fail(9, 0.05), "each rank counts once"
    assert not watches[1].all_fail(9, 0.05) and watches[2].all_fail(9, 0.05) and watches[0].all_fail(9, 0.05)


def test_a_rank_that_fails_while_another_waits_in_the_call_must_end(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    first, second = (Watch(rank, 2, store, patience=0.5) for rank in range(2))
    monkeypatch.setattr(first._thread, "is_alive", lambda: True)
    waiting(monkeypatch, 0.6, second)
    second._look()
    assert first.failed_in(0) is None


def test_rank_0_says_who_has_not_reached_a_phase_and_the_others_read_it() -> None:
    store = dist.HashStore()
    agreements = [StartAgreement(rank, 12, store) for rank in range(12)]
    store.set("k/here/5", "1")
    store.add("k/arrived", 1)
    assert agreements[5]._late(store, "k", "the model") == "rank 0 has not reached 'the model'"
    store.set("k/here/0", "1")
    store.add("k/arrived", 1)
    assert agreements[5]._late(store, "k", "the model") == "rank 0 has not said which ranks have not reached 'the model'"
    expected = "rank 1, 2, 3, 4, 6, 7, 8, 9 and 2 more has not reached 'the model'"
    assert agreements[0]._late(store, "k", "the model") == agreements[5]._late(store, "k", "the model") == expected
    for rank in range(12):
        store.set(f"k/here/{rank}", "1")
    assert agreements[0]._late(store, "k", "the model") == "'the model' is nearly done"


def test_rank_0_says_who_is_not_connected_and_the_others_read_it() -> None:
    store = dist.HashStore()
    for rank in range(12):
        store.set(f"at/{rank}", f"rank {rank} (process 7)")
    for rank in (3, 4):
        store.set(f"open/{rank}", "1")
        store.add("opened", 1)
    where = [Launch(rank, 12) for rank in range(12)]
    assert process_group._unconnected(where[2], store, looks=False) == "rank 2 (process 7) is not connected to the other ranks"
    names = [f"rank {rank} (process 7)" for rank in (0, 1, 2, 5, 6, 7, 8, 9, 10)]
    assert process_group._unconnected(where[0], store, looks=True) == (
        f"rank 0 (process 7) is not connected to {', '.join(names[1:])} and 1 more ranks"
    )
    assert process_group._unconnected(where[2], store, looks=False) == (
        f"rank 2 (process 7) is not connected to {', '.join([*names[:2], *names[3:]])} and 1 more ranks"
    )
    assert process_group._unconnected(where[11], store, looks=False).endswith(f"to {', '.join(names[:8])} and 2 more ranks")


def test_a_process_that_may_not_open_a_file_for_each_connection_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    limits, given = (1024, 4096), list[tuple[int, int]]()
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: given.append(new))
    process_group._allow_files(Launch(0, 170), gloo=False)
    assert given == []
    process_group._allow_files(Launch(0, 1024), gloo=False)
    assert given == [(3 * 1024 + 512, 4096)]
    with pytest.raises(LayoutError, match=r"rank 0 of 1,024 has 4 connections.* 4,608 open files, but its limit is 4,096; raise"):
        process_group._allow_files(Launch(0, 1024), gloo=True)
    limits = (1024, resource.RLIM_INFINITY)
    process_group._allow_files(Launch(0, 65536), gloo=False)
    assert given[1:] == [(3 * 65536 + 512, resource.RLIM_INFINITY)]


def test_the_first_ranks_stand_for_more() -> None:
    assert several(["rank 0", "rank 1"], 9) == "rank 0; rank 1, and 5 more ranks"
