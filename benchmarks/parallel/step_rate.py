"""Steps per second of `parallelize` on two processes, over torch's own strategies put together by hand, for one plain module.

    python benchmarks/parallel/step_rate.py [--rounds 15] [--steps 4]

Both sides live in the same two processes and take turns; the ratio of a round is by hand / Forge in seconds, so above 1 Forge is
faster. By hand: `fully_shard` of each block and of the rest; `parallelize_module` with column- and row-wise linear layers.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from forge_parallel import parallelize

WIDTH, HEADS, LAYERS, VOCAB, LENGTH, ROWS = 256, 4, 4, 4096, 256, 4
PLAN = {f"blocks.*.{name}": "colwise" for name in ("q", "k", "v", "up")} | {"blocks.*.o": "rowwise", "blocks.*.down": "rowwise"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.first(x)
        q, k, v = (part(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def by_hand(kind: str) -> nn.Module:
    torch.manual_seed(0)
    net, mesh = Net(), init_device_mesh("cpu", (2,))
    for block in net.blocks:
        if kind == "tp2":
            column = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel())
            parallelize_module(block, mesh, {**column, "o": RowwiseParallel(), "down": RowwiseParallel()})
        else:
            fully_shard(block, mesh=mesh)
    return net if kind == "tp2" else fully_shard(net, mesh=mesh)  # type: ignore[return-value]


def trainer(module: nn.Module, parameters: Any, share: Tensor) -> Callable[[], float]:
    every = list(parameters)  # the fused kernel does not take plain tensors and DTensors together
    groups = [[p for p in every if isinstance(p, DTensor) is kind] for kind in (True, False)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups if group], lr=1e-4, fused=True)

    def step() -> float:
        loss = F.cross_entropy(module(share[:, :-1]).flatten(0, 1), share[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def compare(kind: str, rounds: int, steps: int) -> None:
    rows = torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    ours = parallelize(Net(), kind, tp_plan=PLAN)
    share = rows.chunk(ours.data_ranks)[ours.data_rank]
    theirs = by_hand(kind)
    sides = {"Forge": trainer(ours.module, ours.parameters(), share), "by hand": trainer(theirs, theirs.parameters(), share)}
    losses = {name: [step() for _ in range(3)] for name, step in sides.items()}  # warm-up, and the same numbers
    assert all(abs(a - b) < 1e-3 for a, b in zip(*losses.values(), strict=True)), losses
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                sides[name]()
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        ratios = sorted(b / a for a, b in zip(seconds["Forge"], seconds["by hand"], strict=True))
        low, median, high = statistics.quantiles(ratios, n=4)
        rate = steps / statistics.median(seconds["Forge"])
        print(f"{kind}: by hand / Forge {median:.3f} (quartiles {low:.3f} to {high:.3f}); Forge {rate:.2f} steps/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        subprocess.run([*launcher, __file__, *sys.argv[1:]], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return
    dist.init_process_group("gloo")
    for kind in ("dp2", "tp2"):
        compare(kind, arguments.rounds, arguments.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
