"""Between a device and the host: copies in order, in buffers that nothing else touches; saves by way of a late device."""

import errno
import weakref
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt.late_device import PACES, Queue
from ckpt.ranks import digest, sample, whole
from ckpt.test_store import Faulty
from forge_ckpt.checkpoint import read
from forge_ckpt.checkpoint.read import load
from forge_ckpt.checkpoint.save import save
from forge_ckpt.format import tensor_bytes
from forge_ckpt.format.tensor_bytes import DTYPES, DoubleBuffer, file_of, queued, to_device, to_host, way_to
from forge_ckpt.store.local import LocalStore
from forge_ckpt.world import SingleProcessWorld
from forge_core.errors import CheckpointError
from forge_core.protocols.checkpoint import Piece

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


@pytest.fixture(params=PACES)
def queue(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    """Saves and loads take this device's way, with chunks of 24 bytes."""
    queue = Queue(request.param)
    for module in (tensor_bytes, read):
        monkeypatch.setattr(module, "CHUNK_BYTES", 24)
        monkeypatch.setattr(module, "DoubleBuffer", partial(DoubleBuffer, way=queue.way))
    yield queue


def of_every_dtype() -> dict[str, torch.Tensor]:
    raw = torch.randint(0, 256, (35 * 16,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    state = {}
    for name, dtype in DTYPES.items():
        values = (raw % 2 if name == "bool" else raw)[: 35 * dtype.itemsize].view(dtype).reshape(5, 7)
        state |= {name: values, f"{name} across": values.t(), f"{name} one": values[2, 3], f"{name} none": values[:0]}
    return state


def test_a_checkpoint_has_the_bytes_of_a_cpu(queue: Queue, tmp_path: Path) -> None:
    state, store = of_every_dtype(), LocalStore(tmp_path / "c")
    save(store, whole(state), {}, 1, SingleProcessWorld())
    expected = b"".join(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in state.values())
    assert store.read("step-00000001/rank-00000.bin") == expected
    copies = sum(-(-tensor.numel() * tensor.element_size() // 24) for tensor in state.values())
    assert [word for word in queue.said if word.startswith("wait")] == [f"wait {number}" for number in range(copies)]

    live = {name: torch.zeros_like(tensor, memory_format=torch.contiguous_format) for name, tensor in state.items()}
    queue.said.clear()
    load(store, 1, whole(live), SingleProcessWorld())
    assert b"".join(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in live.values()) == expected
    assert len([word for word in queue.said if word.startswith("wait")]) == copies


def test_a_file_that_is_written_anew_has_all_chunks(queue: Queue) -> None:
    file = file_of(whole(sample()))
    next(iter(file))
    first = [bytes(view) for view in file]
    sums = list(file.checksums)
    assert [bytes(view) for view in file] == first and file.checksums == sums and len(sums) == 4
    assert b"".join(first) == b"".join(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in sample().values())


def test_a_save_that_is_tried_again_has_the_same_bytes(queue: Queue, tmp_path: Path) -> None:
    expected = LocalStore(tmp_path / "c")
    save(expected, whole(sample()), {}, 1, SingleProcessWorld())
    store = LocalStore(tmp_path / "d", probe=Faulty("write", errno.EIO, skip=7), pause=0.0)
    save(store, whole(sample()), {}, 1, SingleProcessWorld())
    assert store.retries == 1
    assert store.read("step-00000001/rank-00000.bin") == expected.read("step-00000001/rank-00000.bin")
    live = {name: torch.zeros_like(tensor) for name, tensor in sample().items()}
    load(store, 1, whole(live), SingleProcessWorld())
    assert digest(list(live.values())) == digest(list(sample().values()))


def test_a_store_that_keeps_chunks_saves_nothing(tmp_path: Path) -> None:
    class Collects(LocalStore):
        def write(self, path: str, chunks: Any) -> None:
            super().write(path, [b"".join(chunks)])

    store = Collects(tmp_path / "c")
    with pytest.raises(CheckpointError, match="was not saved: rank 0: TypeError"):
        save(store, whole(sample()), {}, 1, SingleProcessWorld())
    assert [name for name in store.list() if name.startswith("step-")] == []


class Reads(LocalStore):
    """Remembers how much was read at once."""

    most = total = 0

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        self.most, self.total = max(self.most, len(buffer)), self.total + len(buffer)
        super().read_into(path, offset, buffer)


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("size", [40, 100, 400, 4000])
def test_a_part_is_read_by_chunks_however_wide_its_rows(
    size: int, strided: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows have 3 * 32 * 4 = 384 bytes; a chunk may be a part of one, one, or all of them."""
    monkeypatch.setattr(tensor_bytes, "CHUNK_BYTES", size)
    store = Reads(tmp_path / "c")
    full = torch.arange(5 * 3 * 32, dtype=torch.int32).view(5, 3, 32)
    save(store, whole({"t": full}), {}, 1, SingleProcessWorld())
    for low, high in [((0, 0, 0), (5, 3, 32)), ((1, 1, 0), (4, 3, 32)), ((0, 0, 5), (5, 3, 19)), ((2, 1, 31), (3, 2, 32))]:
        extent = [b - a for a, b in zip(low, high, strict=True)]
        live = (
            torch.zeros(extent[::-1], dtype=torch.int32).permute(2, 1, 0) if strided else torch.zeros(extent, dtype=torch.int32)
        )
        store.most = store.total = 0
        piece = Piece("t", (5, 3, 32), low, live, True)
        with DoubleBuffer(size) as turns:
            box = (0, 0, 0), (5, 3, 32)
            tensor_bytes.copy_box(store, "step-00000001/rank-00000.bin", 0, box, piece.local, piece.offset, turns)
        assert torch.equal(live, full[tuple(slice(a, b) for a, b in zip(low, high, strict=True))])
        assert 0 < store.most <= size
        assert store.total <= full[low[0] : high[0]].numel() * 4
