"""A module and a loop of your own on several processes: `torchrun --nproc-per-node 4 plain_module.py dp2tp2`.

First, once: `python plain_module.py verify` compares a step on each axis with one process.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from forge_parallel import parallelize, verify_layout
from forge_parallel.transforms import Recompute


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.Sequential(*(Block(64) for _ in range(4))), nn.Linear(64, 1))


PLAN = {"1.*.up": "colwise", "1.*.down": "rowwise"}  # what tensor parallelism cuts; not needed without tp


def train(layout: str, steps: int = 20) -> list[float]:
    """Losses of each step, of the whole batch of 32 rows."""
    model = parallelize(build, layout, [Recompute(policy="full")], tp_plan=PLAN)  # weights as `build` makes them
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        rows = torch.randn(32, 16, generator=torch.Generator().manual_seed(step))
        mine = rows.chunk(model.data_ranks)[model.data_rank]  # ranks of one data rank read the same rows
        loss = F.mse_loss(model.module(mine), mine.sin().sum(1, keepdim=True))
        loss.backward()
        model.clip_grad_norm(1.0)  # one norm over all ranks
        optimizer.step()
        optimizer.zero_grad()
        losses.append(model.mean(loss))
    return losses


if __name__ == "__main__":
    if sys.argv[1:] == ["verify"]:
        verify_layout(build, "dp2tp2", [Recompute(policy="full")], tp_plan=PLAN)
        print("every axis gives the step of one process")
        sys.exit()
    if "RANK" in os.environ:
        dist.init_process_group()
    for step, loss in enumerate(train(sys.argv[1] if len(sys.argv) > 1 else "1")):
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"step {step} loss {loss:.5f}")
    if dist.is_initialized():
        dist.destroy_process_group()
