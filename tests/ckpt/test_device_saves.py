"""Saves and loads by way of a device whose copies are late, and parts of wide tensors."""

import errno
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.late_device import PACES, Queue
from ckpt.ranks import digest, sample, whole
from ckpt.test_store import Faulty
from forge_ckpt.checkpoint import read
from forge_ckpt.checkpoint.read import load
from forge_ckpt.checkpoint.save import save
from forge_ckpt.format import tensor_bytes
from forge_ckpt.format.tensor_bytes import DTYPES, DoubleBuffer, file_of
from forge_ckpt.store.local import LocalStore
from forge_ckpt.world import SingleProcessWorld
from forge_core.errors import CheckpointError
from forge_core.protocols.checkpoint import Piece


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
