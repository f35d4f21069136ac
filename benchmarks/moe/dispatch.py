"""Bytes that each dispatcher of experts sends over the least that would do, and the time of a layer with it, on gloo processes.

    python benchmarks/moe/dispatch.py [--processes 2,4] [--dispatchers all_to_all,all_gather,hierarchical] [--skews 0,1,inf]
    python benchmarks/moe/dispatch.py --smoke     # tiny sizes, one round: whether everything runs and gives the same outputs

The least: each (token, other rank that has one of its experts) is one row out and one row back, in the forward and again in the
backward; the row is dim values in the precision of the layer. Bytes are counted where torch's collectives are called, so they are
exact on any machine; beside rows they hold weights and numbers of a token's experts, and the counts of what arrives. `border` is
the same for rows that leave a node of `--node` ranks, each (token, other node) once; all-gather is not split by borders.

Times are of dispatch, products and sums, forward and backward, the slowest rank's. Dispatchers take turns, a ratio is taken round
by round. With more processes than cores, and through shared memory, they say little about a cluster. Skews as in `layer.py`.
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
from layer import DTYPES, chosen
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core.layout import Layout
from forge_models.blocks.moe.dispatch import LocalDispatch
from forge_models.blocks.moe.experts import Experts
from forge_models.components.decoder import DecoderConfig
from forge_parallel.dryrun.traffic import Traffic
from forge_parallel.placement.topology import Topology
from forge_parallel.transforms.dispatchers import open_dispatcher


class Border(TorchDispatchMode):
    """Bytes that this rank sends to ranks of other nodes by all-to-all."""

    def __init__(self, node: int) -> None:
        super().__init__()
        self.node, self.bytes = node, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            rows, _, sent, name = args
            here = dist.get_rank() // self.node
            for to, count in zip(dist.get_process_group_ranks(_resolve_process_group(name)), sent, strict=True):
                if to // self.node != here:
                    self.bytes += count * rows[:1].numel() * rows.element_size()
        return func(*args, **(kwargs or {}))


def visits(experts: Tensor, share: int, home: int) -> int:
    """How many different (token, holder other than `home`) there are, when each holder has `share` experts."""
    holders = experts // share
    goes = torch.zeros(len(experts), int(holders.max()) + 1, dtype=torch.bool).scatter_(1, holders, True)
    return int(goes.sum()) - (int(goes[:, home].sum()) if home < goes.shape[1] else 0)


def drawn(options: argparse.Namespace, own: range) -> Experts:
    """The experts `own` of all, each from its own number."""
    context = DecoderConfig(dim=options.dim, layers=1, heads=1, ffn_dim=options.ffn, vocab_size=2).shape.context(0)
    held = Experts(context, len(own), "silu", True)
    with torch.no_grad():
        for parameter in held.parameters():
            for place, expert in enumerate(own):
                parameter[place].normal_(0, 0.05, generator=torch.Generator().manual_seed(expert))
    return held.to(DTYPES[options.dtype])


class Side:
    """One dispatcher on this rank, with its share of the experts and this rank's tokens."""

    def __init__(self, kind: str, options: argparse.Namespace, skew: float) -> None:
        rank, ranks, dtype = dist.get_rank(), dist.get_world_size(), DTYPES[options.dtype]
        self.layout, self.options = Layout(dp_shard=ranks, ep=ranks), options
        topology = Topology.of(self.layout, torch.device("cpu"))
        node = options.node if kind == "hierarchical" else None
        self.dispatch = open_dispatcher(LocalDispatch(), topology, kind, node)  # type: ignore[arg-type]
        share = options.experts // ranks
        self.held = drawn(options, range(rank * share, rank * share + share))
        generator = torch.Generator().manual_seed(rank)
        self.x = torch.randn(options.tokens, options.dim, generator=generator).to(dtype).requires_grad_()
        self.slope = torch.randn(options.tokens, options.dim, generator=generator).to(dtype)
        self.weights = torch.rand(options.tokens, options.top_k, generator=generator).requires_grad_()
        # `inf` has the same experts on every rank, whatever the seed: those of rank 0's order
        self.chosen = chosen(options.tokens, options.experts, options.top_k, skew, 0 if skew == float("inf") else rank)

    def __call__(self) -> Tensor:
        for leaf in (self.x, self.weights, *self.held.parameters()):
            leaf.grad = None
        count, slots = self.options.experts, self.chosen.numel()
        y = self.dispatch(self.x, self.chosen, self.weights, self.held, count, slots)
        y.backward(self.slope)
        return y.detach()

    def expected(self) -> Tensor:
        """The same tokens on one process with all experts."""
        count = self.options.experts
        with torch.no_grad():
            return LocalDispatch()(
                self.x, self.chosen, self.weights, drawn(self.options, range(count)), count, self.chosen.numel()
            )

    def sent(self) -> tuple[int, int]:
        """Bytes of one forward and backward that leave this rank, and those that leave its node."""
        with Border(self.options.node) as border:
            self()
        traffic = Traffic(self.layout)
        with traffic:
            self()
        return sum(flow.wire for flow in traffic.flows()), border.bytes

    def least(self) -> tuple[int, int]:
        """Four rows for each (token, other rank) of this rank, and for each (token, other node)."""
        rank, ranks, node = dist.get_rank(), dist.get_world_size(), self.options.node
        share, row = self.options.experts // ranks, self.options.dim * DTYPES[self.options.dtype].itemsize
        return 4 * row * visits(self.chosen, share, rank), 4 * row * visits(self.chosen, share * node, rank // node)


def total(numbers: tuple[int, ...]) -> list[int]:
    """Sums over ranks."""
    summed = torch.tensor(numbers)
    dist.all_reduce(summed)
    return summed.tolist()


def timed(call: Callable[[], Tensor]) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    call()
    spent = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent)


def compare(options: argparse.Namespace, skew: float) -> None:
    """One line per dispatcher."""
    ranks = dist.get_world_size()
    kinds = [kind for kind in options.dispatchers.split(",") if kind != "hierarchical" or ranks > options.node]
    sides = {kind: Side(kind, options, skew) for kind in kinds}
    for kind, side in sides.items():
        found, expected = side(), side.expected()
        difference = float((found - expected).abs().max() / expected.abs().max())
        if difference > (1e-5 if options.dtype == "fp32" else 0.05):
            raise SystemExit(f"{kind} on {ranks} processes differs from one process by {difference:.1e}")
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(options.rounds):
        for kind in kinds if number % 2 else kinds[::-1]:
            seconds[kind].append(timed(sides[kind]))
    for kind, side in sides.items():
        (sent, left), (least, least_left) = total(side.sent()), total(side.least())
        border = ""
        if ranks > options.node and kind != "all_gather":
            border = f"  border {left / 2**20:8.2f} MiB, least {least_left / 2**20:8.2f}, ratio {left / max(1, least_left):7.4f}"
        ratios = sorted(ours / first for ours, first in zip(seconds[kind], seconds[kinds[0]], strict=True))
        quarter = len(ratios) // 4
        spread = f"{statistics.median(ratios):5.2f} ({ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f})"
        if dist.get_rank() == 0:
            print(
                f"{ranks:3} skew {skew:3g} {kind:12}  sent {sent / 2**20:8.2f} MiB, least {least / 2**20:8.2f}, "
                f"ratio {sent / max(1, least):7.4f}  {1e3 * statistics.median(seconds[kind]):8.2f} ms, "
                f"/ {kinds[0]} {spread}{border}",
                flush=True,
            )


def main() -> None:
    """One line per number of processes, skew and dispatcher."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", default="2,4")
    parser.add_argument("--dispatchers", default="all_to_all,all_gather,hierarchical")
    parser.add_argument("--skews", default="0,1,inf")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--tokens", type=int, default=1024, help="of one rank")
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--ffn", type=int, default=128, help="hidden width of one expert")
    parser.add_argument("--node", type=int, default=2, help="ranks of a node")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--smoke", action="store_true", help="whether everything runs; measures nothing")
    options = parser.parse_args()
    if options.smoke:
        options.tokens, options.dim, options.ffn, options.rounds = 32, 16, 8, 1
    if "RANK" not in os.environ:
        print(
            f"{options.tokens} tokens a rank, {options.experts} experts, top-{options.top_k}, dim {options.dim}, {options.dtype}"
        )
        for count in options.processes.split(","):
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count]
            subprocess.run([*launcher, __file__, *sys.argv[1:]], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return
    dist.init_process_group("gloo")
    for skew in map(float, options.skews.split(",")):
        compare(options, skew)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
