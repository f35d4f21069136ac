"""Copies between a device and the host: in order, one ahead, in buffers that nothing else touches meanwhile."""

import weakref
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from ckpt.late_device import PACES, Queue
from ckpt.ranks import whole
from forge_ckpt.format import tensor_bytes
from forge_ckpt.format.tensor_bytes import DoubleBuffer, file_of, queued, to_device, to_host, way_to

SIZE = 8


def chunks(*sizes: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(sizes))
    return [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]


def taken(sources: list[torch.Tensor], queue: Queue) -> list[bytes]:
    """What a host that is slower than the device gets."""
    found = []
    for number, view in enumerate(to_host(iter(sources), DoubleBuffer(SIZE, queue.way))):
        if queue.pace == "meanwhile":
            queue.catch_up()
        queue.said.append(f"take {number}")
        found.append(bytes(view))
    return found


SIZES = [(), (5,), (8, 3), (8, 8, 1), (1, 8, 2, 8, 8, 4, 7)]


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("sizes", SIZES)
def test_the_host_gets_each_chunk(pace: str, sizes: tuple[int, ...]) -> None:
    sources = chunks(*sizes)
    assert taken(sources, Queue(pace)) == [source.numpy().tobytes() for source in sources]


def test_the_next_copy_is_queued_before_the_host_waits_for_this_one() -> None:
    queue = Queue()
    taken(chunks(8, 8, 8, 8), queue)
    assert queue.said == [
        *("16 bytes", "queue 0", "queue 1", "wait 0", "take 0", "queue 2", "wait 1", "take 1"),
        *("queue 3", "wait 2", "take 2", "wait 3", "take 3"),
    ]


def filled(sources: list[torch.Tensor], queue: Queue) -> list[bytes]:
    """What a device has of chunks that the host reads."""

    def read(number: int, memory: memoryview) -> None:
        if queue.pace == "meanwhile":
            queue.catch_up()
        queue.said.append(f"read {number}")
        memory[:] = sources[number].numpy().data

    targets = [torch.zeros_like(source) for source in sources]
    with DoubleBuffer(SIZE, queue.way) as turns:
        for number, target in enumerate(targets):
            to_device(target, partial(read, number), turns)
        queue.said.append("end")
    return [target.numpy().tobytes() for target in targets]


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("sizes", SIZES)
def test_the_device_gets_each_chunk(pace: str, sizes: tuple[int, ...]) -> None:
    sources = chunks(*sizes)
    assert filled(sources, Queue(pace)) == [source.numpy().tobytes() for source in sources]


def test_the_host_reads_into_one_buffer_while_the_other_is_copied() -> None:
    queue = Queue()
    filled(chunks(8, 8, 8, 8), queue)
    assert queue.said == [
        *("16 bytes", "read 0", "queue 0", "read 1", "queue 1", "wait 0", "read 2", "queue 2", "wait 1", "read 3", "queue 3"),
        *("end", "wait 3", "wait 2"),
    ]


def test_who_stops_early_leaves_no_copy_under_way() -> None:
    queue = Queue()
    views = to_host(iter(chunks(8, 8, 8)), DoubleBuffer(SIZE, queue.way))
    view = next(views)
    views.close()
    assert queue.said[1:] == ["queue 0", "queue 1", "wait 0", "wait 1"]
    with pytest.raises(ValueError, match="released"):
        bytes(view)

    def fails(_: memoryview) -> None:
        raise OSError("cannot be read")

    queue = Queue()
    with suppress(OSError), DoubleBuffer(SIZE, queue.way) as turns:
        to_device(chunks(8)[0], lambda memory: None, turns)
        to_device(chunks(8)[0], fails, turns)
    assert queue.said[1:] == ["queue 0", "wait 0"]


def test_a_view_is_of_no_use_to_whom_keeps_it() -> None:
    for turns in (DoubleBuffer(SIZE), DoubleBuffer(SIZE, Queue().way)):  # a store that is tried on a CPU learns of it there
        kept = list(to_host(iter(chunks(8, 8)), turns))
        for view in kept:
            with pytest.raises(ValueError, match="released"):
                bytes(view)


def address(view: memoryview) -> int:
    return np.frombuffer(view, dtype=np.uint8).ctypes.data


def test_nothing_is_copied_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_bytes, "CHUNK_BYTES", 100)
    tensor = torch.randn(9, 7)
    found = [(address(view), len(view)) for view in file_of(whole({"t": tensor}))]
    assert found == [(tensor.data_ptr(), 100), (tensor.data_ptr() + 100, 100), (tensor.data_ptr() + 200, 52)]
    seen: list[int] = []
    flat = tensor.view(-1).view(torch.uint8)
    to_device(flat, lambda memory: seen.append(address(memory)), DoubleBuffer(0))
    assert seen == [tensor.data_ptr()]


def test_a_cpu_needs_no_way() -> None:
    assert way_to(torch.device("cpu"), SIZE) is None


@pytest.mark.parametrize("accelerator", ["cuda", "other", "none"])
def test_the_host_waits_in_each_copy_where_memory_cannot_be_pinned(accelerator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, asked = torch.empty, []

    def empty(*size: int, **how: Any) -> torch.Tensor:
        asked.append(how.get("pin_memory", False))
        if asked[-1]:
            raise RuntimeError("no memory can be pinned")
        return plain(*size, **how)

    there = {"cuda": torch.device("cuda"), "other": torch.device("xpu"), "none": None}[accelerator]
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: there)
    way = way_to(torch.device("cuda", 0), 2 * SIZE)
    assert way is not None and asked == ([True, False] if accelerator == "cuda" else [False])
    source = chunks(8)[0]
    landing = way.copy(way.memory[:SIZE], source)
    assert torch.equal(way.memory[:SIZE], source), "it is there when the call returns"
    landing()
    assert way.memory.numel() == 2 * SIZE and way.memory.device.type == "cpu"


@pytest.mark.parametrize("where", ["cpu", "device"])
def test_a_source_that_was_made_for_its_copy_is_gone_before_the_next_is_made(where: str) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def made() -> Iterator[torch.Tensor]:
        for number in range(4):
            assert not alive or alive[-1]() is None, "two copies of tensors at once"
            source = torch.full((SIZE,), number, dtype=torch.uint8)
            alive.append(weakref.ref(source))
            yield source
            del source

    turns = DoubleBuffer(SIZE) if where == "cpu" else DoubleBuffer(SIZE, Queue("early").way)
    assert [bytes(view) for view in to_host(made(), turns)] == [bytes([number]) * SIZE for number in range(4)]


def test_the_event_of_a_copy_is_of_the_stream_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a second device, too, which is not the current one."""
    said: list[tuple[str, object]] = []

    class Event:
        def __init__(self, device: torch.device, enable_timing: bool) -> None:
            said.append(("event", (device, enable_timing)))

        def record(self, stream: object) -> None:
            said.append(("record", stream))

        def synchronize(self) -> None:
            said.append(("synchronize", None))

    device, source = torch.device("cuda", 1), chunks(8)[0]
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"stream of {device}")
    into = torch.zeros_like(source)
    landing = queued(device, into, source)
    assert said == [("event", (device, False)), ("record", "stream of cuda:1")] and torch.equal(into, source)
    landing()
    assert said[2:] == [("synchronize", None)]
