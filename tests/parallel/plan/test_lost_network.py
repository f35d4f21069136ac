"""A network between ranks that does not carry what it should: every rank says so by name, and none waits for ever.

`tests/train/launch/test_two_hosts.py` has the same with two hosts and a link, as root.
"""

import logging
import os
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from forge_core.errors import ForgeError, LayoutError
from forge_parallel.launch import process_group
from forge_parallel.launch.environment import read_launcher
from forge_parallel.launch.process_group import destroy_process_groups, init_process_groups
from forge_parallel.launch.watch import PeerFailure, Watch
from forge_parallel.torch_private import store_with
from harness.pool import World

NOT_CONNECTED = "is not connected to"


def _opened(guilty: str = "", card: str = "", timeout: float = 90.0) -> tuple[type, str, int, list[str], float]:
    """What a rank raises when rank `guilty` cannot connect: its interface does not exist, or its packets are dropped."""
    where, said, began = read_launcher(os.environ), list[str](), time.monotonic()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("forge_parallel.launch.meeting").addHandler(handler)
    if str(where.rank) == guilty and card:
        os.environ["GLOO_SOCKET_IFNAME"] = card
    elif str(where.rank) == guilty:
        process_group._connect = lambda *arguments: time.sleep(60)  # as gloo, whose packets nobody answers
    try:
        init_process_groups(where, timeout=timeout, patience=0.5)
    except ForgeError as error:
        return type(error), str(error), error.exit_code, said, time.monotonic() - began
    raise AssertionError("it started")


def test_an_interface_that_one_rank_does_not_have_is_refused_by_all(world: World) -> None:
    results = world.run(_opened, 3, "2", "eth7", group=False, fresh=True)
    assert len({message for _, message, *_ in results}) == 1
    kind, message, code, _, seconds = results[0]
    assert (kind, code) == (LayoutError, 2) and seconds < 60
    assert message.startswith("rank 2 (process ") and "address of eth7 (GLOO_SOCKET_IFNAME) unknown" in message
    assert NOT_CONNECTED in message and "Unable to find address for: eth7" in message and "`ip -br address`" in message


def test_a_rank_that_reaches_nobody_is_named_while_the_others_wait_and_when_they_give_up(world: World) -> None:
    results = world.run(_opened, 2, "1", "", 4.0, group=False, fresh=True)
    assert {(kind, code) for kind, _, code, _, _ in results} == {(PeerFailure, 5)}
    assert len({message for _, message, *_ in results}) == 1
    _, message, _, _, seconds = results[0]
    assert NOT_CONNECTED in message and "firewall" in message
    assert 3.5 < seconds < 60
    for rank, (*_, said, _) in enumerate(results):
        assert any(f"rank {rank} (process " in line and f"{NOT_CONNECTED} rank {1 - rank}" in line for line in said)


def _watched() -> tuple[str, bool]:
    where = read_launcher(os.environ)
    init_process_groups(where, timeout=20)
    watch = Watch.open(where, 5.0, 20.0)
    time.sleep(1.5)
    group = store_with("name")
    assert group is not None
    heard = group.check(["watch/rank/0"])
    group.set(f"asked/{where.rank}", "")
    group.wait(["asked/0", "asked/1"])  # the store ends with rank 0
    watch.stop()
    destroy_process_groups()
    return watch.host, heard


def test_a_watch_knows_the_host_of_its_store_and_belongs_to_its_own_start(world: World) -> None:
    """A store that outlives the ranks has the notes of their earlier starts, so each start has names of its own."""
    results = world.run(_watched, 2, group=False, fresh=True)
    assert all(host.startswith("rank 0 (process ") and heard for host, heard in results)


class Silent:
    """A store whose connection is cut: no call returns."""

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: threading.Event().wait()


def _silent(patience: float, timeout: float) -> Watch:
    return Watch(1, 2, Silent(), patience, timeout, host="rank 0 (process 7 on left)", at="left:29500")


def test_a_store_that_does_not_answer_is_reported_and_ends_the_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ends: list[tuple[str, float]] = []
    began = time.monotonic()
    monkeypatch.setattr(Watch, "_leave", lambda watch, cause: (ends.append((cause, time.monotonic() - began)), watch._done.set()))
    watch = _silent(0.4, 2.0)
    watch.start()
    watch._second.join(20)
    (cause, seconds), *more = ends
    assert not more and 2.0 < seconds < 19
    assert cause.startswith("rank 0 (process 7 on left) at left:29500 has not answered for ") and "is cut" in cause
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) >= 2 and all("at left:29500 has not answered" in line and "rank 1 is in" in line for line in warnings)


def test_a_store_that_answers_is_not_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(Watch, "_leave", lambda watch, cause: pytest.fail(cause))
    watch = Watch(1, 2, dist.HashStore(), 0.4, 1.0)
    watch.start()
    time.sleep(2)
    assert watch._second.is_alive() and not caplog.records
    watch.stop()
    watch._second.join(5)
    assert not watch._second.is_alive()


def test_a_broken_connection_is_explained_though_the_store_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_parallel.launch.watch._NOTE_SECONDS", 0.5)
    watch, began = _silent(0.5, 60.0), time.monotonic()
    failure = watch.explain(RuntimeError("gloo: Timed out waiting 1000ms for recv operation to complete"))
    assert str(failure).startswith("rank 0 (process 7 on left) at left:29500 has not answered for ") and failure.exit_code == 5
    explained = time.monotonic()
    watch.failed(str(failure), 5)
    assert 0.5 < explained - began < 20 and time.monotonic() - explained < 1, "it does not ask again"


def test_a_note_that_cannot_be_left_does_not_keep_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forge_parallel.launch.watch._NOTE_SECONDS", 0.5)
    began = time.monotonic()
    _silent(0.5, 60.0).failed("x", 3)
    assert 0.5 <= time.monotonic() - began < 20
