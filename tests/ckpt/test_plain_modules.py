"""A plain module and its optimizer, under torch's own parallelism: saved in one, loaded in another, without forge-parallel."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from forge_ckpt import LocalStore, ProcessGroupWorld, SingleProcessWorld, load, newest, pieces, save
from forge_core.errors import CheckpointError
from harness.pool import World

ROWS = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """With a tied weight, a buffer, sizes that two ranks do not share evenly, and a vector that one rank holds alone."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(5, 7)
        self.up, self.down = nn.Linear(7, 6), nn.Linear(6, 7)
        self.scale = nn.Parameter(torch.ones(1))
        self.tied = nn.Linear(7, 5, bias=False)
        self.again = self.tied
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = self.module(x)
        return self.again(x + self.scale * self.down(self.up(x).relu()))


def _laid_out(kind: str) -> nn.Module:
    torch.manual_seed(dist.get_rank() if kind == "fsdp" and dist.is_initialized() else 3)
    module = Net()
    if kind == "ddp":
        return DistributedDataParallel(module)
    if kind == "fsdp":
        fully_shard(module.up)
        fully_shard(module)
    if kind == "fsdp and tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(module, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        for part in (module.up, module.down):
            fully_shard(part, mesh=mesh["dp"])
    return module


def _trained(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> float:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")  # of tensor parallelism, unchanged here
        for _ in range(steps):
            loss = module(ROWS).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return loss.item()


def _optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.05, foreach=False)


def _saved(kind: str, folder: Path) -> float:
    """Ten lines."""
    module = _laid_out(kind)
    optimizer = _optimizer(module)
    _trained(module, optimizer, 3)
    world = ProcessGroupWorld() if dist.is_initialized() else SingleProcessWorld()
    save(LocalStore(folder), pieces(module, optimizer, world=world), {"rate": 0.05}, step=3, world=world)
    return _trained(module, optimizer, 2)


def _resumed(kind: str, folder: Path) -> tuple[float, dict[str, Tensor]]:
    module = _laid_out(kind)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(3)
    optimizer = _optimizer(module)
    world = ProcessGroupWorld() if dist.is_initialized() else SingleProcessWorld()
    store = LocalStore(folder)
    found = newest(store, world)
    assert found is not None
    meta = load(store, found, pieces(module, optimizer, world=world, fresh=True), world)
    assert meta["rate"] == optimizer.param_groups[0]["lr"] == 0.05
    state = {name: t.full_tensor() if isinstance(t, DTensor) else t.clone() for name, t in module.state_dict().items()}
    return _trained(module, optimizer, 2), state


@pytest.mark.parametrize(("kind", "ranks"), [("ddp", 2), ("fsdp", 2), ("fsdp and tp", 4)])
def test_trials_d12_a_plain_module_is_saved_and_loaded_in_any_layout(world: World, tmp_path: Path, kind: str, ranks: int) -> None:
    """Two ranks to one, and back: the losses go on as if nothing had happened."""
    losses = world.run(_saved, ranks, kind, tmp_path / "a")
    assert losses == pytest.approx([losses[0]] * ranks, rel=1e-6)
    alone, state = _resumed("plain", tmp_path / "a")
    assert alone == pytest.approx(losses[0], rel=1e-5)
    assert state["seen"] == 3
    torch.manual_seed(0)
    plain = _saved("plain", tmp_path / "b")
    for found, others in world.run(_resumed, ranks, kind, tmp_path / "b"):
        assert found == pytest.approx(plain, rel=1e-5)
        assert {name.removeprefix("module.") if kind == "ddp" else name for name in others} == set(Net().state_dict())


def _waiting() -> str:
    mesh = init_device_mesh("cpu", (2,))
    module = Net()
    module.register_buffer("sum", DTensor.from_local(torch.ones(2), mesh, [Partial()]))
    try:
        pieces(module, world=ProcessGroupWorld())
    except CheckpointError as refusal:
        return str(refusal)
    return ""


def test_trials_d12_what_is_no_part_of_a_checkpoint_is_refused(world: World) -> None:
    assert all("waits for a sum over ranks" in found for found in world.run(_waiting, 2))
    alone: Any = {"world": SingleProcessWorld()}
    module = Net()
    stranger = torch.optim.SGD(nn.Linear(2, 3).parameters(), lr=1.0, momentum=0.9)
    with pytest.raises(CheckpointError, match=r"parameter of shape \(3, 2\) that the model does not have"):
        pieces(module, stranger, **alone, fresh=True)
    with pytest.raises(CheckpointError, match="an optimizer without steps"):
        pieces(module, stranger, **alone, fresh=True)
    optimizer = _optimizer(module)
    _trained(module, optimizer, 1)
    optimizer.state[module.scale]["step"] = 1
    with pytest.raises(CheckpointError, match="scale/step is a int, and a checkpoint holds tensors"):
        pieces(module, optimizer, **alone)


def test_trials_d12_a_fresh_state_leaves_weights_and_rates() -> None:
    module = Net()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    for optimizer in (
        torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.5),
        torch.optim.SGD(module.parameters(), lr=torch.tensor(0.1), momentum=0.9, weight_decay=0.5),
    ):
        named = [piece.name for piece in pieces(module, optimizer, world=SingleProcessWorld(), fresh=True)]
        assert sum(name.startswith("optimizer/") for name in named) == (24 if isinstance(optimizer, torch.optim.AdamW) else 8)
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.1)
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
