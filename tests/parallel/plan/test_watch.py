"""Who is late is named: over a real store and a real group, on two ranks, with seconds for what takes minutes elsewhere."""

import json
import logging
import os
import random
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from forge_parallel.launch.environment import read_launcher
from forge_parallel.launch.hang_report import RankStatus, late, several
from forge_parallel.launch.limits import LearnedLimits
from forge_parallel.launch.process_group import destroy_process_groups, init_process_groups
from forge_parallel.launch.watch import PeerFailure, Watch, is_broken_connection
from harness.pool import World


def _open(timeout: float, patience: float) -> tuple[Watch, list[str]]:
    where = read_launcher(os.environ)
    init_process_groups(where, timeout)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("forge_parallel.launch.watch").addHandler(handler)
    watch = Watch.open(where, patience, timeout)
    watch._grace = 60  # seconds until the watch would end this process, which is therefore not used again
    return watch, said


def _wait_for_all() -> None:
    dist.all_reduce(torch.zeros(1))


def _late(how: str) -> tuple[str, int, list[str]]:
    """Rank 1 does not come to a collective, for one reason or another; what rank 0 says."""
    watch, said = _open(timeout=4, patience=0.6)
    watch.enter("step 1")
    _wait_for_all()
    watch.enter("step 2")
    code = 0
    if dist.get_rank() == 1:
        if how == "sleeps":
            time.sleep(6)
        elif how == "fails":
            watch.failed("the device is on fire", 3)
        elif how == "interrupted":
            watch.failed("interrupted by SIGTERM", 75)
        elif how == "silent":
            time.sleep(1)
            watch.stop()
        dist.destroy_process_group()  # the others see a connection that closes, as when a process ends
        watch.stop()
        return "", code, said
    try:
        _wait_for_all()
    except RuntimeError as error:
        assert is_broken_connection(error), error
        failure = watch.explain(error)
        message, code = str(failure), failure.exit_code
        watch.failed(message, code)
    else:
        message = "it came"
    destroy_process_groups()
    return message, code, said


def test_h1_who_keeps_the_others_waiting_is_named_while_they_wait_and_when_they_give_up(world: World) -> None:
    (message, code, said), (_, _, own) = world.run(_late, 2, "sleeps", group=False, fresh=True)
    assert 2 <= len(said) <= 4, "after the patience, and after twice as long each time"
    for line in [*said, message]:
        assert "rank 1 (process " in line and "; step 2, test_watch.py:" in line and "(_late), " in line
    assert said[0].startswith("waiting for 1 s in step 2, test_watch.py:") and "(_wait_for_all), for rank 1" in said[0]
    assert "did not come within 4 s. Rank 0 of 2 waited for it in step 2, test_watch.py:" in message
    assert "\n" not in message
    assert code == 5
    assert own == [], "a rank that sleeps waits for nobody"


def test_h3_a_rank_that_ends_without_a_word_is_named(world: World) -> None:
    (message, code, _), _ = world.run(_late, 2, "silent", group=False, fresh=True)
    assert message.startswith("rank 1 (process ") and "ended without a message: killed, out of memory or stopped" in message
    assert code == 5


def test_h3_the_first_cause_is_what_the_others_say(world: World) -> None:
    (message, code, _), _ = world.run(_late, 2, "fails", group=False, fresh=True)
    assert message.startswith("rank 1 ended first, with exit code 3: the device is on fire. Rank 0 of 2 waited for it in step 2")
    assert code == 5


def test_h2_who_waits_for_a_rank_that_was_interrupted_was_interrupted_too(world: World) -> None:
    (message, code, _), _ = world.run(_late, 2, "interrupted", group=False, fresh=True)
    assert "interrupted by SIGTERM" in message
    assert code == 75


def _mismatched() -> list[str]:
    """Each rank waits for another one, in another collective: nobody is behind, and nobody comes."""
    watch, said = _open(timeout=2, patience=0.4)
    other = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    watch.enter("step 1")
    try:
        if dist.get_rank() == 0:
            _wait_for_all()
        else:
            dist.all_reduce(torch.zeros(1), group=other)
    except RuntimeError as error:
        assert "did not come within 2 s" in str(watch.explain(error)) or "ended" in str(watch.explain(error))
    time.sleep(0.5)
    watch.stop()
    return said


def test_ranks_that_wait_for_each_other_are_named(world: World) -> None:
    first, second = world.run(_mismatched, 2, group=False, fresh=True)
    assert "for rank 1 (process" in first[0] and "(_mismatched)" in first[0]
    assert "for rank 0 (process" in second[0] and "(_wait_for_all)" in second[0]


def _clean() -> tuple[list[str], int]:
    watch, said = _open(timeout=20, patience=0.3)
    for step in range(4):
        watch.enter(f"step {step}")
        time.sleep(0.5)  # longer than the patience, but together
        _wait_for_all()
    watch.stop()
    destroy_process_groups()
    return said, watch.passed


def test_ranks_that_work_are_not_named(world: World) -> None:
    assert world.run(_clean, 2, group=False, fresh=True) == [([], 4)] * 2


def test_a_world_of_one_has_no_thread() -> None:
    watch = Watch()
    watch.enter("step 1")
    watch.failed("anything", 1)
    watch.stop()
    assert watch.passed == 1 and not watch._thread.is_alive()


@pytest.mark.parametrize(
    ("error", "broken"),
    [
        (RuntimeError("[/x/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3"), True),
        (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 6000ms for recv operation to complete"), True),
        (dist.DistBackendError("NCCL error: remote process exited or there was a network error"), True),
        (RuntimeError("[enforce fail at gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes. 8 vs 4"), False),
        (RuntimeError("the download timed out"), False),
        (dist.DistBackendError("NCCL error: unhandled cuda error"), False),
        (ConnectionResetError("Connection reset by peer"), False),
    ],
)
def test_only_what_a_lost_peer_causes_is_its_fault(error: Exception, broken: bool) -> None:
    assert is_broken_connection(error) == broken
    outer = ValueError("a stage failed")
    outer.__cause__ = error
    assert is_broken_connection(outer) == broken


def blamed(*ranks: tuple[int, bool] | tuple[int, bool, str]) -> list[int | str]:
    """Ranks that are named when each has passed so many marks, waits or not, at a place."""
    seen = {at: RankStatus(at, "", 1, each[0], "", each[2] if len(each) > 2 else "", 0, each[1]) for at, each in enumerate(ranks)}
    return [sight.rank if isinstance(sight, RankStatus) else sight for sight in late(seen)]


def test_who_is_late() -> None:
    assert blamed((7, True), (7, True), (6, True), (7, False)) == [2], "the one that is behind"
    assert blamed((7, True), (7, True), (8, True), (7, False)) == [3], "of those at the same mark, the one that works"
    assert blamed((7, True), (7, True), (8, False), (7, False)) == [3], "who is ahead has been here"
    assert blamed((7, True), (7, True), (7, True), (7, True)) == [0, 1, 2, 3]
    assert blamed((7, True, "a"), (7, True, "b"), (7, True, "a")) == [1], "most of those that wait do so at one place"
    assert blamed((7, True), (8, True), (7, True)) == [1], "who has left out a collective is ahead"
    assert blamed((7, True, "a"), (7, True, "b")) == [0, 1], "two ranks at two places: either may be the one that hangs"
    assert blamed((7, True, "a"), (8, True, "b"), (7, True, "c")) == [0, 2], "without most of them, those behind"


def test_silence_comes_first_and_a_rank_that_waits_does_not_name_itself() -> None:
    watch = Watch(0, 4)
    watch.passed = 7
    seen = {rank: RankStatus(rank, "", 1, 7, "", "", 0, True) for rank in (1, 2)}
    watch._heard = {rank: (1, time.monotonic()) for rank in (1, 2)}
    assert list(watch._late(seen)) == ["rank 3 (no status received)"]
    seen[3] = seen[2]._replace(rank=3, passed=6)
    watch._heard[3] = (1, time.monotonic())
    assert [sight.rank for sight in watch._late(seen) if isinstance(sight, RankStatus)] == [3]
    watch._heard[1] = (1, time.monotonic() - 100)
    (silent,) = watch._late(seen)
    assert isinstance(silent, RankStatus) and silent._replace(silent=0) == seen[1]
    assert "0 s; no status for 100 s: stopped, or the network to its host is cut)" in str(silent)


def test_many_late_ranks_are_counted() -> None:
    failure = PeerFailure("x", 75)
    assert failure.exit_code == 75 and PeerFailure.exit_code == 5
    assert several([f"rank {rank}" for rank in range(9)]) == "rank 0; rank 1; rank 2; rank 3, and 5 more ranks"


def _third() -> tuple[str, int]:
    """Rank 2 fails, which rank 0 learns from its note, and rank 1 after rank 0 has taken the store along."""
    watch, _ = _open(timeout=20, patience=1)
    rank = dist.get_rank()
    dist.barrier()  # all have set how long their watch lets them live
    if rank == 2:
        watch.failed("the device is on fire", 3)
        return "", 0
    time.sleep(1)  # its thread has read the note
    if rank == 0:
        watch.failed("one more fault", 1)
        return "", 0
    watch._store = None if watch._known is None else dist.HashStore()  # that of the note is not asked again
    failure = watch.explain(RuntimeError("gloo: Connection closed by peer"))
    return str(failure), failure.exit_code


def test_h3_the_first_note_is_kept_when_the_store_goes(world: World) -> None:
    _, (message, code), _ = world.run(_third, 3, group=False, fresh=True)
    assert message.startswith("rank 2 ended first, with exit code 3: the device is on fire. Rank 1 of 3 waited for it in ")
    assert code == 5


LOST = RuntimeError("gloo: Connection closed by peer")


def test_h3_only_the_first_note_counts() -> None:
    store = dist.HashStore()
    watches = [Watch(rank, 3, store) for rank in range(3)]
    watches[1].failed("the device is on fire", 3)
    watches[2].failed("a fault that follows", 1)
    failure = watches[0].explain(LOST)
    assert str(failure).startswith("rank 1 ended first, with exit code 3: the device is on fire. Rank 0 of 3 waited")
    assert failure.exit_code == 5


class Gone:
    """A store that must not be asked."""

    def __getattr__(self, name: str) -> None:
        raise AssertionError(name)


def test_fault_35_of_two_that_see_a_hang_in_the_same_moment_the_second_adds_its_stacks() -> None:
    """It had not read the first one's note yet, and its own comes too late."""
    store = dist.HashStore()
    first, second = (Watch(rank, 2, store) for rank in range(2))
    first._leave_note("rank 1 did not come", 5, hangs=True)
    assert second._leave_note("rank 1 did not come", 5, hangs=True)["rank"] == 0
    assert store.check(["stacks/1"])
    told, _ = json.loads(store.get("stacks/1"))
    assert told.startswith("rank 1 (") and "test_fault_35_of_two" in told
    assert not store.check(["stacks/0"])  # who writes the report asks itself


def test_h3_a_note_that_was_read_needs_no_store() -> None:
    store = dist.HashStore()
    Watch(1, 2, store).failed("the device is on fire", 3)
    watch = Watch(0, 2, store)
    assert watch._note() is not None
    watch._store = Gone()
    assert "the device is on fire" in str(watch.explain(LOST))


def test_h3_hints_of_the_place_are_kept() -> None:
    store = dist.HashStore()
    Watch(1, 2, store).failed("x", 3)
    error = RuntimeError("gloo: Timed out waiting")
    error.add_note("prepare the data beforehand")
    assert str(Watch(0, 2, store).explain(error)).endswith("; prepare the data beforehand")


class Fixed:
    """Limits that are known; notes what they are told."""

    def __init__(self, **seconds: float) -> None:
        self.seconds, self.told = seconds, list[str]()

    def took(self, section: str, seconds: float) -> None:
        self.told.append(section)

    def of(self, section: str, waiting: float) -> float | None:
        return self.seconds.get(section)


def pair(**seconds: float) -> tuple[Watch, Watch]:
    """Two ranks of one store, without threads."""
    store = dist.HashStore()
    return tuple(Watch(rank, 2, store, patience=1.0, limits=Fixed(**seconds)) for rank in range(2))  # type: ignore[return-value]


def looks(*watches: Watch, times: int, apart: float = 0.2) -> list[str | None]:
    """What each says after so many looks, `apart` seconds of their clocks each."""
    said: list[str | None] = [None] * len(watches)
    for _ in range(times):
        for watch in watches:
            watch._woke -= apart
            said[watch.rank] = said[watch.rank] or watch._look()
    return said


def test_fault_35_a_rank_that_may_take_longer_is_not_ended_by_those_that_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = pair(step=1.0, save=100.0)
    for watch in (first, second):
        watch.enter("a save", "save")
    first.enter("step 2", "step")
    sight = first._sight
    monkeypatch.setattr(first, "_sight", lambda: sight()._replace(waits=True))
    assert looks(first, second, times=40) == [None, None]
    assert first._sight().is_over, "it waits for the other one, which may take longer"
    second.enter("step 2", "step")
    said, _ = looks(first, second, times=40)
    assert said is not None and said.startswith("rank 1 (") and said.endswith("did not come within 1 s")
    assert isinstance(second.limits, Fixed) and second.limits.told == ["save"]


def test_fault_35_a_process_that_was_stopped_has_not_used_up_its_time() -> None:
    watch, _ = pair(step=1.0)
    watch.enter("step 1", "step")
    assert looks(watch, times=1, apart=1000.0) == [None]
    assert watch._sight().held < 0.5
    assert looks(watch, times=2) == [None], "a hang is said after more than its time"


def test_fault_35_what_has_no_limit_and_who_is_in_a_debugger_takes_any_time() -> None:
    watch, _ = pair(step=1.0)
    watch.enter("a download")
    assert looks(watch, times=100) == [None]
    watch.enter("step 1", "step")
    space: dict[str, object] = {"__name__": "pdb", "look": watch._sight}
    exec("def held():\n    return look()", space)  # noqa: S102 (a module of this name)
    held: Callable[[], RankStatus] = space["held"]  # type: ignore[assignment]
    assert held().limit is None and watch._sight().limit == 1.0


def alarms(times: list[float]) -> int:
    """How many of these, one after another, took longer than they might."""
    limits, found = LearnedLimits(0.0), 0
    for seconds in times:
        limit = limits.of("step", 600)
        found += limit is not None and seconds > limit
        limits.took("step", seconds)
    return found


def test_fault_35_no_false_alarm_in_1000_noisy_clean_steps() -> None:
    for seed in range(20):
        noise = random.Random(seed)
        clean = [noise.lognormvariate(0, 0.4) * (5 if noise.random() < 0.02 else 1) for _ in range(1000)]
        assert alarms(clean) == 0
        assert alarms([60.0, *clean]) == 0, "a first step that compiles"
        assert alarms([*clean, 30.0]) == 1, "thirty times the median is a hang"


def test_fault_35_a_limit_is_ten_times_the_ninetieth_percentile_and_never_below_the_floor() -> None:
    limits = LearnedLimits(3.0, waiting=("data",))
    for seconds in range(1, 10):
        limits.took("step", seconds)
    assert limits.of("step", 600) is None, "nine times are too few"
    limits.took("step", 10)
    assert limits.of("step", 600) == 90, "of one to ten, nine are not above nine"
    for _ in range(10):
        limits.took("update", 0.001)
    assert limits.of("update", 600) == 3
    assert limits.of("data", 600) == 600, "as long as ranks wait for each other, until it is known"
    assert limits.of("evaluate", 600) is None
    for _ in range(200):
        limits.took("step", 1)
    assert limits.of("step", 600) == 10, "old times are forgotten"
