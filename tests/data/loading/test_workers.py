"""Loader workers: the same samples, states that are those of consumed batches, and processes that end when they should."""

import dataclasses
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.steps import Drip, opened, rows_of, steps_of
from forge_core.batch import Batch
from forge_core.errors import DataError
from forge_data.components import Tokens, TokenStore
from forge_data.loading.worker_pool import WorkerPool
from forge_data.section import Data

LENGTH, G = 16, 16


@pytest.fixture
def data(numbered: Callable[..., Path]) -> Data:
    return Data(
        sequence_length=LENGTH,
        sources=[
            TokenStore(path=str(numbered("a", 3000)), weight=0.7, label="a"),
            TokenStore(path=str(numbered("b", 800, 11)), weight=0.3, label="b"),
        ],
    )


@pytest.mark.parametrize(("workers", "ranks", "micro"), [(1, 1, 4), (2, 1, 16), (3, 2, 2), (8, 1, 1)])
def test_fault_18_workers_leave_every_step_alone(data: Data, workers: int, ranks: int, micro: int) -> None:
    expected, cursor = steps_of(data, 5, batch=G)
    found, after = steps_of(data, 5, batch=G, ranks=ranks, micro=micro, workers=workers)
    assert found == expected and after == cursor


def test_workers_take_turns(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole step each: a step that all of them share costs a message to each, and their small parts cost more a token."""
    asked: list[tuple[int, int, int]] = []
    send = WorkerPool._send

    def noted(crew: WorkerPool, worker: Any, message: tuple[Any, ...]) -> None:
        if message[0] == "fill":
            step, start, stop = message[4:7]
            asked.append((worker.number, step, stop - start))
        send(crew, worker, message)

    monkeypatch.setattr(WorkerPool, "_send", noted)
    stream = opened(dataclasses.replace(data, loader_workers=3, prefetch=1), batch=G, micro=G)
    reading = stream.from_cursor(stream.start())
    next(reading)
    assert asked == [(0, 0, G), (1, 1, G), (2, 2, G)], "each has something to do, whatever prefetch is"
    next(reading)
    reading.close()
    assert asked[3:] == [(0, 3, G)]


def test_the_state_is_that_of_the_consumed_step_not_of_what_is_ahead(data: Data) -> None:
    stream = opened(dataclasses.replace(data, loader_workers=2, prefetch=8), batch=G, micro=G)
    reading = stream.from_cursor(stream.start())
    cursors = [json.loads(json.dumps(after)) for _, after in itertools.islice(reading, 3)]
    reading.close()
    assert [cursor["sample"] for cursor in cursors] == [G, 2 * G, 3 * G]
    expected, _ = steps_of(data, 6, batch=G)
    for step, cursor in enumerate(cursors, 1):
        assert steps_of(data, 2, batch=G, workers=1, cursor=cursor)[0] == expected[step : step + 2]


@pytest.mark.parametrize(("workers", "ranks"), [(2, 1), (3, 2)])
def test_streams_are_read_by_one_worker_and_any_number_of_ranks(data: Data, workers: int, ranks: int) -> None:
    streamed = dataclasses.replace(data, sources=[*data.sources, Drip(weight=2.0)], readers=4, shuffle_buffer=3)
    expected, end = steps_of(streamed, 8, batch=G)
    first, cursor = steps_of(streamed, 3, batch=G, ranks=ranks, workers=workers)
    rest, last = steps_of(streamed, 5, batch=G, workers=workers, cursor=json.loads(json.dumps(cursor)))
    assert first + rest == expected and last == end


def test_a_batch_that_is_kept_is_never_overwritten(data: Data) -> None:
    stream = opened(dataclasses.replace(data, loader_workers=1), batch=G, micro=4)
    kept, copies = [], []
    reading = stream.from_cursor(stream.start())
    for step, (batches, _) in enumerate(itertools.islice(reading, 12)):
        if step % 3 == 0:
            kept.append(batches[1].tokens[:2])
            copies.append(kept[-1].clone())
        del batches
    reading.close()
    assert all(torch.equal(view, copy) for view, copy in zip(kept, copies, strict=True))


@pytest.mark.parametrize(("workers", "prefetch"), [(2, 3), (3, 1)])
def test_memory_of_consumed_batches_is_used_again_and_workers_do_not_run_ahead(data: Data, workers: int, prefetch: int) -> None:
    stream = opened(dataclasses.replace(data, loader_workers=workers, prefetch=prefetch), batch=G, micro=G)
    reading, places = stream.from_cursor(stream.start()), set()
    for batches, _ in itertools.islice(reading, 30):
        places.add(batches[0].tokens.data_ptr())
        del batches
    reading.close()
    # Three ahead, of which each of three workers makes one, and the one in hand: what a slow consumer makes them wait for.
    assert len(places) <= 4


def starts_by_hand(documents: list[list[int]]) -> list[int]:
    flat = [(row, document) for row, line in enumerate(documents) for document in line]
    starts = [place for place, here in enumerate(flat) if place == 0 or here != flat[place - 1]]
    size = next(size for size in (64, 128, 256, 512) if size > len(starts))
    return starts + [len(flat)] * (size - len(starts))


@pytest.mark.parametrize("workers", [0, 1])
def test_pinned_batches_leave_the_rows_memory_at_once(data: Data, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy to the device may still run when a batch is let go: only torch's own allocator knows when it has ended."""
    expected, _ = steps_of(data, 6, batch=G)
    pinned: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr("forge_data.accelerator.is_used", lambda: True)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    stream = opened(dataclasses.replace(data, loader_workers=workers, prefetch=1), batch=G, micro=4)
    reading = stream.from_cursor(stream.start())
    found = [batches for batches, _ in itertools.islice(reading, 6)]  # all are kept
    reading.close()
    assert [rows_of(batches) for batches in found] == expected
    # tokens, labels, positions, documents and sources of a step, and where documents start in each of its micro-batches
    assert len(pinned) == (5 + G // 4) * 6
    for batch in itertools.chain(*found):
        assert batch.document_starts is not None and batch.documents is not None
        assert batch.document_starts.tolist() == starts_by_hand(batch.documents.tolist())
    assert found[0][1].tokens.untyped_storage().data_ptr() in {tensor.data_ptr() for tensor in pinned[:4]}


def test_nothing_is_pinned_without_an_accelerator(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    """Page-locked memory is scarce, and asking for it initializes a device."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda *_: pytest.fail("pinned"))
    for initialized, available in ((False, True), (True, False)):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda found=initialized: found)
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=available: found)
        assert steps_of(data, 1, batch=G)[0]


class Copied:
    """A tensor that records how it is copied."""

    def __init__(self) -> None:
        self.asynchronous: list[bool] = []

    def to(self, _: object, non_blocking: bool) -> "Copied":
        self.asynchronous.append(non_blocking)
        return self


@pytest.mark.parametrize(("device", "asynchronous"), [("cpu", False), (torch.device("cpu"), False), ("cuda", True)])
def test_copies_to_the_host_have_arrived_when_they_are_returned(device: Any, asynchronous: bool) -> None:
    """Only the stream of a device orders a copy before its use; the host would read memory that is not written yet."""
    tokens = Copied()
    Batch(tokens, tokens).to(device)  # type: ignore[arg-type]
    assert tokens.asynchronous == [asynchronous] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_on_cuda_are_pinned_and_arrive_whole(data: Data, workers: int) -> None:
    expected, _ = steps_of(data, 40, batch=G)
    torch.cuda.init()
    stream = opened(dataclasses.replace(data, loader_workers=workers), batch=G, micro=4)
    reading, arrived = stream.from_cursor(stream.start()), []
    for batches, _ in itertools.islice(reading, 40):
        assert all(batch.tokens.is_pinned() and batch.documents.is_pinned() for batch in batches)
        torch.cuda._sleep(1_000_000)  # the copies wait in the stream while the host goes on
        arrived.append([batch.to("cuda") for batch in batches])
        del batches
    reading.close()
    assert [rows_of([batch.to("cpu") for batch in batches]) for batches in arrived] == expected


def test_no_global_random_state_is_touched(data: Data) -> None:
    data = dataclasses.replace(data, sources=[*data.sources, Drip(label="drip")])
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index, union-attr]
    steps_of(data, 3, batch=G)
    steps_of(data, 2, batch=G, workers=1)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before  # type: ignore[index, union-attr]


def test_an_error_is_raised_with_the_workers_traceback_at_its_step() -> None:
    broken = Data(sequence_length=LENGTH, sources=[Drip(fails_at=10)], shuffle="none", shuffle_buffer=1)
    stream = opened(dataclasses.replace(broken, loader_workers=1, prefetch=4), batch=4)
    reading = stream.from_cursor(stream.start())
    with pytest.raises(RuntimeError, match=r"record 10 of shard 2 is broken") as caught:
        for step, _ in enumerate(reading):
            assert step < 20
    assert "in loader worker 0" in str(caught.value) and "in stream" in str(caught.value)
    with pytest.raises(ValueError, match="record 10"):  # at the same step as without workers
        for found, _ in enumerate(opened(broken, batch=4).from_cursor(stream.start())):
            assert found <= step
    assert found == step


def test_a_refusal_stays_one(tmp_path: Path) -> None:
    ids = np.ones(1 + LENGTH * 40, dtype=np.uint16)
    np.save(tmp_path / "ids.npy", ids)
    data = Data(sequence_length=LENGTH, sources=[Tokens(path=str(tmp_path / "ids.npy"))], loader_workers=1)
    stream = opened(data, batch=4)
    np.save(tmp_path / "ids.npy", ids + 1)
    with pytest.raises(DataError, match="files changed since the run opened them"):
        next(stream.from_cursor(stream.start()))


def pids_of(stream: Any) -> tuple[Any, list[int]]:
    reading = stream.from_cursor(stream.start())
    next(reading)
    listed = subprocess.run(
        ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True, check=True
    )
    return reading, [int(line.split()[0]) for line in listed.stdout.splitlines() if "forge_data.loading.worker" in line]


def gone(pids: list[int], seconds: float = 10) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if not any(Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2] for pid in pids):
            return True
        time.sleep(0.02)
    return False


def test_a_worker_that_is_killed_is_named(data: Data) -> None:
    reading, pids = pids_of(opened(dataclasses.replace(data, loader_workers=2), batch=G))
    assert len(pids) == 2
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(RuntimeError, match="was killed by signal 9"):
        for _ in range(5):
            next(reading)
    assert gone(pids)


def test_fault_29_signals_to_the_group_do_not_end_the_data(data: Data) -> None:
    reading, pids = pids_of(opened(dataclasses.replace(data, loader_workers=2), batch=G))
    expected, _ = steps_of(data, 6, batch=G)
    for number, step in zip(
        (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP), range(1, 6), strict=True
    ):
        for pid in pids:
            os.kill(pid, number)
        batches, _ = next(reading)
        assert rows_of(batches) == expected[step]
    reading.close()
    assert gone(pids)


SCRIPT = """
import itertools, os, sys, time
from pathlib import Path
from forge_data.loading.stream import open_stream
from forge_data.section import Data
from forge_data.components import TokenStore
data = Data(sequence_length=16, sources=[TokenStore(path=sys.argv[1])], loader_workers=2)
stream = open_stream(data, workspace=Path("unused"), seed=5, global_batch=16, micro_batch=16)
reading = stream.from_cursor(stream.start())
next(reading)
print("ready", flush=True)
time.sleep(60)
"""


def test_workers_die_with_a_parent_that_is_killed_and_need_no_main_guard(data: Data) -> None:
    path = data.sources[0].path  # type: ignore[attr-defined]
    with subprocess.Popen([sys.executable, "-c", SCRIPT, path], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
        listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent.pid)], capture_output=True, text=True, check=True)
        pids = [int(line) for line in listed.stdout.split()]
        assert len(pids) == 2
        parent.kill()
    assert gone(pids)


def test_a_worker_imports_no_torch(data: Data) -> None:
    modules = "forge_data.loading.worker, forge_data.loading.worker_pool, forge_data.loading.rows"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_components_of_the_main_script_are_refused(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Drip, "__module__", "__main__")
    with pytest.raises(DataError, match=r"Drip is defined in the main script.*data\.loader_workers = 0"):
        opened(Data(sources=[Drip()], sequence_length=LENGTH, loader_workers=1), batch=4)
