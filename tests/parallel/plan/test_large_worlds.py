"""What a start and the watch ask of the store: constant for each rank, linear for rank 0 (benchmarks/parallel/rendezvous.py)."""

import json
import math
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
from forge_parallel.launch.large_store import ReadingTurn, absent, pause_of, put, values
from forge_parallel.launch.watch import Watch
from forge_parallel.model.realize import Blueprint
from forge_train.process.ranks import StartAgreement
from forge_train.recipe.load import load_recipe

BENCHMARKS = Path(__file__).parents[3] / "benchmarks" / "parallel"


@pytest.fixture(scope="module")
def rendezvous() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield import_module("rendezvous")
        sys.modules.pop("rendezvous")


@pytest.fixture(scope="module")
def large_worlds(rendezvous: ModuleType) -> Iterator[ModuleType]:
    yield import_module("large_worlds")
    for name in ("large_worlds", "plan"):
        sys.modules.pop(name, None)


WORLDS = (16, 64, 256)


def test_another_rank_asks_the_same_in_every_world_and_rank_0_at_most_linearly(rendezvous: ModuleType) -> None:
    counted = {world: dict(rendezvous.rows(world)) for world in WORLDS}
    assert len(counted[16]) == 7
    for what in counted[16]:
        others = {world: found[what]["another"].total for world, found in counted.items()}
        late = 2 if what == "meeting" else 0  # checks, if rank 0 closes the meeting between two of them
        assert max(others.values()) - min(others.values()) <= late, (what, others)
        assert others[16] <= 8 + late
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
    # In longer meetings rank 0 says more often who is missing.
    assert threads[0].keys - threads[0].calls["set"] == simulated["rank 0"].keys - simulated["rank 0"].calls["set"]
    for store in threads[1:]:
        late = store.calls["check"] - simulated["another"].calls["check"]  # rank 0 may close the meeting between two checks
        assert 0 <= late <= 2
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
    first, second, third = (ReadingTurn(store, "turn", rank, 3.0) for rank in range(3))
    assert first.mine() and first.mine()
    assert not second.mine() and not third.mine()
    now += 2.9
    assert not second.mine(), "it has seen the turn for 2.9 seconds"
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
    third.leave()
    assert third.mine(), "it may take it again at once"
    assert not first.mine()
    now += 3.1
    assert first.mine(), "after a silence"
    first.leave()
    assert third.mine() and not first.mine(), "who lost it by silence, and asks after it was left, has it"
    assert third.mine() and not second.mine()
    third.leave()
    monkeypatch.setattr(third, "_store", None)
    third.leave()  # asks nothing


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
    for seconds, later in ((0.6, 0.1), (0.7, 0.2), (0.9, 0.3), (1.2, 0.0)):
        waiting(monkeypatch, seconds, *watches[:6])
        for watch in watches[:7]:  # rank 7 is silent
            assert watch._look() is None
        assert store.check(["late"]) == (seconds >= 0.9), "only a second reading tells who is alive"
        now += later
    assert readings == [3, 0, 0, 0, 0, 0, 0, 0]
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["waiting for 1 s in the start, fit, for rank 7 (no status received)"] * 6
    assert not watches[3]._reading.mine()
    monkeypatch.setattr(watches[0], "_sight", lambda: Watch._sight(watches[0]))
    watches[0]._look()
    assert watches[3]._reading.mine(), "a rank that waits no longer leaves the turn to the others"


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


def test_what_was_said_of_an_earlier_wait_is_not_said_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = dist.HashStore()
    watch, reader = Watch(0, 3, store, patience=5.0), Watch(1, 3, store, patience=5.0)
    assert reader._reading.mine()
    reader._publish(["rank 2 (of an hour ago)"])
    for seconds in (3.0, 6.0):
        waiting(monkeypatch, seconds, watch)
        assert watch._look() is None
    assert not caplog.records
    reader._publish(["rank 2 (now)"])
    watch._look()
    watch._look()
    assert [record.getMessage() for record in caplog.records] == ["waiting for 6 s in the start, fit, for rank 2 (now)"]


class OneSecond:
    """The limit of every section."""

    def took(self, section: str, seconds: float) -> None:
        pass

    def of(self, section: str, waiting: float) -> float | None:
        return 1.0


def test_of_ranks_that_exceed_their_limit_one_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    watches = [Watch(rank, 2, store, patience=5.0, limits=OneSecond()) for rank in range(2)]
    for watch in watches:
        watch.enter("step 1", "step")
        watch._look()
        watch._awake += 100.0
        assert watch._sight().is_over
    assert watches[0]._look() is None and watches[0]._suspected, "it reads once more before it says so"
    monkeypatch.setattr(watches[1], "_sights", lambda: pytest.fail("it reads the others, too"))
    assert watches[1]._look() is None and not watches[1]._suspected


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


def test_rank_0_reads_messages_in_order_and_waits_for_one_that_is_about_to_be_written(rendezvous: ModuleType) -> None:
    store = dist.HashStore()
    host = rendezvous._Host(
        dist.PrefixStore("forge", store), rendezvous.attendant(0, 5), rendezvous.wait_of(0, 5), outlives=False
    )

    def write(number: int) -> None:
        host.store.set(f"came/{number}", rendezvous.attendant(number, 5).as_text())

    host.store.add("came", 3)
    write(1)
    write(3)
    assert not host.complete() and sorted(host.present) == [0, 1]
    assert host.missing() == "2 of 5 ranks have come; rank 2, 3, 4 did not come to node0:29500"
    write(2)
    assert not host.complete() and sorted(host.present) == [0, 1, 2, 3]
    host.store.add("came", 1)
    write(4)
    assert host.complete()


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
    with pytest.raises(LayoutError, match=r"rank 0 of 1,024 has 4 connections.* 4,160 open files, but its limit is 4,096; raise"):
        process_group._allow_files(Launch(0, 1024), gloo=True)
    limits = (100, 256)
    process_group._allow_files(Launch(0, 2), gloo=True)
    assert given.pop() == (256, 256), "a small world starts where few files are allowed"
    limits = (1024, resource.RLIM_INFINITY)
    process_group._allow_files(Launch(0, 65536), gloo=False)
    assert given[1:] == [(3 * 65536 + 512, resource.RLIM_INFINITY)]


def test_the_first_ranks_stand_for_more() -> None:
    assert several(["rank 0", "rank 1"], 9) == "rank 0; rank 1, and 5 more ranks"


def test_a_manifest_grows_with_the_ranks_that_hold_slices_and_a_rank_s_table_does_not(large_worlds: ModuleType) -> None:
    found = {world: {row[1:2] + row[3:4]: row[4] for row in large_worlds.checkpoint(world)} for world in (64, 128, 256)}

    def values_of(what: str, quantity: str) -> list[float]:
        return [found[world][what, quantity] for world in (64, 128, 256)]

    whole, replicas = "all ranks hold slices", "64 ranks hold slices"
    assert len(set(values_of(whole, "bytes of a rank's table"))) == 1
    first, second, third = values_of(whole, "bytes of the manifest")
    assert 48 < (second - first) / (64 * 200) < 52 and 48 < (third - second) / (128 * 200) < 52
    assert values_of(whole, "files") == [64, 128, 256] and values_of(replicas, "files") == [64, 64, 64]
    first, _, third = values_of(replicas, "bytes of the manifest")
    assert third - first < 10
    first, _, third = values_of(replicas, "bytes sent to rank 0")
    assert third - first == 192 * 100, "the head of a table without slices"


def test_planned_bytes_are_those_of_the_closed_form(large_worlds: ModuleType) -> None:
    """FSDP pads the first dimension to a multiple of its ranks, gathers weights in bf16 for each of four micro-batches and
    scatters gradients once in fp32; replicas sum a shard."""
    shapes = [tuple(tensor.shape) for tensor in Blueprint.of(load_recipe("7b", world=64).job.model.build).module.parameters()]
    assert sum(math.prod(shape) for shape in shapes) == 8_030_261_248
    sent = {row[1:4]: row[4] for row in large_worlds.read() if row[0] == "plan"}
    worlds = {name: sorted({ranks for what, ranks, _ in sent if what == name}) for name in large_worlds.PLANNED}
    assert 65536 in worlds["7b, replicas of 64 shards"] and 4096 in worlds["7b, all shards"]
    for name in ("7b, all shards", "7b, replicas of 64 shards"):
        for world in worlds[name]:
            shards = 64 if "replicas" in name else world
            padded = sum(-(-shape[0] // shards) * shards * math.prod(shape[1:]) for shape in shapes)
            gathered, scattered = 4 * 2 * padded * (shards - 1) / shards, 4 * padded * (shards - 1) / shards
            assert sent[name, world, "bytes sent: dp_shard all_gather"] == pytest.approx(gathered, rel=1e-5)
            assert sent[name, world, "bytes sent: dp_shard reduce_scatter"] == pytest.approx(scattered, rel=1e-5)
            if (replicas := world // shards) > 1:
                summed = 2 * (replicas - 1) / replicas * 4 * padded / shards
                assert sent[name, world, "bytes sent: dp_replicate all_reduce"] == pytest.approx(summed, rel=1e-5)


def test_every_curve_of_the_page_has_its_points(large_worlds: ModuleType) -> None:
    page = (large_worlds.PICTURES.parent / "large-worlds.md").read_text()
    rows = large_worlds.read()
    for name, (_, _, curves) in large_worlds.CHARTS.items():
        assert f"](large-worlds/{name}.svg)" in page and (large_worlds.PICTURES / f"{name}.svg").is_file()
        for part, what, quantity in curves:
            assert sum(row[:2] + row[3:4] == (part, what, quantity) for row in rows) >= 3, (name, what, quantity)
