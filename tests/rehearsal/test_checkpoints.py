"""A checkpoint of tensors on a device has the bytes of a CPU's, and the host waits once for each chunk that travels."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.ranks import digest, whole
from forge_ckpt.checkpoint.read import load
from forge_ckpt.checkpoint.save import save
from forge_ckpt.format import tensor_bytes
from forge_ckpt.format.manifest import CHUNK_BYTES
from forge_ckpt.format.tensor_bytes import DTYPES
from forge_ckpt.store.local import LocalStore
from forge_ckpt.world import SingleProcessWorld
from forge_core.protocols.checkpoint import Piece
from harness.pool import World

pytestmark = pytest.mark.rehearsal
FILE = "step-00000001/rank-00000.bin"


def state() -> dict[str, torch.Tensor]:
    """Every dtype: as it is, across, one number, nothing; a tensor of some chunks; one that stays on the host."""
    generator = torch.Generator().manual_seed(3)
    found: dict[str, torch.Tensor] = {}
    for name, dtype in DTYPES.items():
        raw = torch.randint(0, 2 if name == "bool" else 256, (35 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        values = raw.view(dtype).reshape(5, 7)
        found |= {name: values, f"{name} across": values.t(), f"{name} one": values[2, 3], f"{name} none": values[:0]}
    many = torch.randint(0, 256, (5, CHUNK_BYTES // 2 + 11), dtype=torch.uint8, generator=generator)
    return {"many": many, "host": torch.arange(9), **found, "many across": many.t()}


def placed() -> dict[str, torch.Tensor]:
    """On the device, but for one."""
    return {name: tensor if name == "host" else tensor.to("cuda") for name, tensor in state().items()}


def chunks(tensors: dict[str, torch.Tensor]) -> int:
    """Of those on a device."""
    return sum(-(-tensor.numel() * tensor.element_size() // CHUNK_BYTES) for name, tensor in tensors.items() if name != "host")


def waits(found: Counter[Any]) -> dict[str, int]:
    kinds: Counter[str] = Counter()
    for site, count in found.items():
        kinds[site.place] += count
    return dict(kinds)


def _saved_and_loaded(folder: Path, pinned: bool) -> tuple[dict[str, int], dict[str, int], str, set[str]]:
    from rehearsal.device.waits import counted

    plain = torch.empty

    def empty(*size: Any, **how: Any) -> torch.Tensor:
        if how.get("pin_memory"):
            raise RuntimeError("no memory can be pinned")
        return plain(*size, **how)

    with pytest.MonkeyPatch.context() as patch:
        if not pinned:
            patch.setattr(torch, "empty", empty)
        store, live = LocalStore(folder), placed()
        with counted() as out:
            save(store, whole(live), {}, 1, SingleProcessWorld())
        fresh = {name: torch.zeros_like(tensor) for name, tensor in live.items()}  # also as strided as they are
        with counted() as back:
            load(store, 1, whole(fresh), SingleProcessWorld())
    hosts = [tensor.cpu() for tensor in fresh.values()]
    return waits(out), waits(back), digest(hosts), {tensor.device.type for tensor in fresh.values()}


@pytest.mark.parametrize("pinned", [True, False])
def test_bytes_are_those_of_a_cpu_and_each_chunk_is_waited_for_once(devices: World, tmp_path: Path, pinned: bool) -> None:
    tensors = state()
    store = LocalStore(tmp_path / "here")
    save(store, whole(tensors), {}, 1, SingleProcessWorld())
    ((out, back, loaded, where),) = devices.run(_saved_and_loaded, 1, tmp_path / "there", pinned, group=False)
    assert LocalStore(tmp_path / "there").read(FILE) == store.read(FILE)
    assert loaded == digest(list(tensors.values())) and where == {"cuda", "cpu"}
    count = chunks(tensors)
    assert count > len(DTYPES) * 3
    if pinned:
        place = "forge_ckpt/format/tensor_bytes.py PinnedBuffer.wait"
        assert back == {f"{place}: event with work behind it": count}, "a tensor is filled behind its copy"
        assert out == {f"{place}: event with work behind it": count - 2, f"{place}: synchronize": 2}, "the last two end the work"
    else:
        assert out == {"forge_ckpt/format/tensor_bytes.py waited: device to host": count}
        assert back == {"forge_ckpt/format/tensor_bytes.py waited: host to device": count}


def _other_parts(folder: Path) -> list[bool]:
    """Parts of other shapes than those that were saved: rows and columns, wide and narrow, dense and strided."""
    tensor_bytes.CHUNK_BYTES, before = 400, tensor_bytes.CHUNK_BYTES
    found = []
    try:
        full = torch.arange(5 * 3 * 64, dtype=torch.int32).view(5, 3, 64)
        store = LocalStore(folder)
        save(store, whole({"t": full.to("cuda")}), {}, 1, SingleProcessWorld())
        for low, high in [((1, 1, 0), (4, 3, 64)), ((0, 0, 5), (5, 3, 19)), ((2, 1, 63), (3, 2, 64))]:
            extent = [b - a for a, b in zip(low, high, strict=True)]
            dense = torch.zeros(extent, dtype=torch.int32, device="cuda")
            for live in (dense, torch.zeros(extent[::-1], dtype=torch.int32, device="cuda").permute(2, 1, 0)):
                load(store, 1, [Piece("t", (5, 3, 64), low, live, True)], SingleProcessWorld())
                found.append(torch.equal(live.cpu(), full[tuple(slice(a, b) for a, b in zip(low, high, strict=True))]))
    finally:
        tensor_bytes.CHUNK_BYTES = before
    return found


def test_parts_of_other_layouts_are_chosen_on_the_device(devices: World, tmp_path: Path) -> None:
    (found,) = devices.run(_other_parts, 1, tmp_path / "c", group=False)
    assert found == [True] * 6
