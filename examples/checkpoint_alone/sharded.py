"""Saves and loads a sharded module: `torchrun --nproc-per-node 2 sharded.py save FOLDER`, `python sharded.py load FOLDER`."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from forge_ckpt import LocalStore, ProcessGroupWorld, SingleProcessWorld, load, newest, pieces, save

STEPS = 3


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns the module, sharded if there are several processes, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 30), nn.Tanh(), nn.Linear(30, 5))
    if dist.is_initialized():
        fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, stop: int) -> None:
    """Trains steps [first, stop); every process reads the same rows."""
    for step in range(first, stop):
        rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def save_to(folder: Path) -> None:
    """Trains and saves; every process writes its own shards."""
    model, optimizer = build()
    train(model, optimizer, 0, STEPS)
    world = ProcessGroupWorld() if dist.is_initialized() else SingleProcessWorld()
    save(LocalStore(folder), pieces(model, optimizer, world=world), {"steps": STEPS}, STEPS, world)


def load_from(folder: Path) -> tuple[nn.Module, torch.optim.Optimizer, int]:
    """Returns module, optimizer and number of steps of the newest checkpoint, on any number of processes."""
    model, optimizer = build()
    world = ProcessGroupWorld() if dist.is_initialized() else SingleProcessWorld()
    store = LocalStore(folder)
    found = newest(store, world)
    if found is None:
        raise SystemExit(f"{folder} has no checkpoint; run `sharded.py save {folder}` first")
    meta = load(store, found, pieces(model, optimizer, world=world, fresh=True), world)
    return model, optimizer, meta["steps"]


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    if sys.argv[1] == "save":
        save_to(Path(sys.argv[2]))
    else:
        _, _, steps = load_from(Path(sys.argv[2]))
        print(f"loaded the weights of {steps} steps")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
