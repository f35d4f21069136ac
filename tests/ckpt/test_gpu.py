"""Checkpoints of a device that is really busy, which no rehearsal shows. Runs with `pytest -m gpu`."""

from pathlib import Path

import pytest
import torch

from ckpt.ranks import whole
from forge_ckpt.checkpoint.read import load
from forge_ckpt.checkpoint.save import save
from forge_ckpt.format.manifest import CHUNK_BYTES
from forge_ckpt.store.local import LocalStore
from forge_ckpt.world import SingleProcessWorld

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def queue_work(size: int = 4096) -> torch.Tensor:
    """Some time of the device: orthogonal turns, so that numbers stay what they are."""
    matrix = torch.eye(size, device="cuda").roll(1, 0)
    found = matrix
    for _ in range(40):
        found = found @ matrix
    return found


def test_a_checkpoint_has_what_was_queued_before_it(tmp_path: Path) -> None:
    """Chunks are neither read before they are written, nor written over before they are read."""
    generator = torch.Generator().manual_seed(0)
    chunks = 9
    source = torch.randint(0, 256, (chunks * CHUNK_BYTES - 7,), dtype=torch.uint8, generator=generator)
    across = torch.randn(2100, 1700, generator=generator)
    late = torch.zeros_like(source, device="cuda")
    there = source.to("cuda")
    busy = queue_work()
    late.copy_(there)
    state = {"busy": busy, "late": late, "across": across.to("cuda").t(), "one": torch.tensor(7, device="cuda")}
    store = LocalStore(tmp_path / "c")
    save(store, whole(state), {}, 1, SingleProcessWorld())
    expected = [tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in state.values()]
    assert expected[1] == source.numpy().tobytes()
    assert store.read("step-00000001/rank-00000.bin") == b"".join(expected)

    live = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    queue_work()
    load(store, 1, whole(live), SingleProcessWorld())
    assert all(torch.equal(live[name], tensor) for name, tensor in state.items())
