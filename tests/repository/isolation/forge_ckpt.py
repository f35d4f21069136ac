"""forge-ckpt alone: save, load, and refuse a flipped byte before any live tensor changes."""

import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

from forge_ckpt import LocalStore, SingleProcessWorld, load, newest, save
from forge_core import CheckpointError
from forge_core.protocols import Piece

assert find_spec("forge_parallel") is None
assert find_spec("forge_models") is None


def pieces(tensor: torch.Tensor) -> list[Piece]:
    return [Piece("model/w", tuple(tensor.shape), (0, 0), tensor, True)]


with tempfile.TemporaryDirectory() as directory:
    store, world = LocalStore(Path(directory)), SingleProcessWorld()
    weight = torch.arange(12.0).reshape(3, 4)
    save(store, pieces(weight), {"cursor": 5}, 1, world)
    found = newest(store, world)
    assert found is not None
    copy = torch.zeros(3, 4)
    assert load(store, found, pieces(copy), world)["cursor"] == 5
    assert torch.equal(copy, weight)

    shard = max((Path(directory) / found.name).iterdir(), key=lambda file: file.stat().st_size * (file.read_bytes()[:1] != b"{"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.chmod(0o644)
    shard.write_bytes(data)
    copy.zero_()
    try:
        load(store, found.name, pieces(copy), world)
    except CheckpointError:
        assert not copy.any()
    else:
        raise AssertionError("a flipped byte was loaded")
