"""One layer of experts, forward and backward: the grouped product against a loop over experts, and against a dense layer of equal
active width.

    python benchmarks/moe/layer.py [--experts 8,32,64,128,256] [--top-k 2,8] [--dtypes bf16,fp32] [--skews 0,1,inf] [--rounds 15]
    python benchmarks/moe/layer.py --smoke     # tiny sizes, two rounds: whether everything runs and both sides agree

Sides take turns; a ratio is taken round by round, and its median and quartiles are given. The loop is the best one that autograd
makes of plain PyTorch: it sorts once, reads the sizes once, takes each matrix by `unbind`, runs an expert's three products while
its tokens are in the cache, leaves out experts without tokens, and adds up by `index_add`. It stands in the same layer, in place
of our dispatcher: both sides count loads. Routing is given, so a router's time is in no side.

A token's experts are different, drawn with odds of 1 / rank^skew: 0 is uniform, with `inf` every token goes to the same ones, the
most uneven load there is. Waste is rows that belong to nobody, as percent of those that belong to somebody: in our layer, those
that are multiplied and those that are carried along, and in two other forms for the same load, groups padded to a multiple of 16
rows and to the busiest expert. With `--capacity` slots are dropped, and the same is counted for those that stay.

With `--threads 1` a figure is the thread's CPU time, which other work on the machine disturbs less.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import isinf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from forge_models.blocks.moe.layer import ExpertLayer
from forge_models.blocks.moe.routers import Routing
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig
from forge_models.components.layers import SwiGLU

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SIDES = ("grouped", "loop", "dense")
ROWS = 16
"""Rows to which groups are padded where a kernel asks for it."""


@dataclass(frozen=True)
class Case:
    tokens: int
    dim: int
    ffn: int
    experts: int
    top_k: int
    dtype: torch.dtype
    skew: float
    capacity: float | None = None

    def layer(self) -> ExpertLayer:
        context = DecoderConfig(dim=self.dim, layers=1, heads=1, ffn_dim=self.ffn, vocab_size=2).shape.context(0)
        moe = MoEConfig(experts=self.experts, top_k=self.top_k, kernel="grouped", capacity=self.capacity)
        layer = ExpertLayer(moe.shape(self.ffn), SwiGLU(), context)
        layer.router = Given(chosen(self.tokens, self.experts, self.top_k, self.skew))
        return drawn(layer).to(self.dtype)

    def dense(self) -> nn.Module:
        context = DecoderConfig(dim=self.dim, layers=1, heads=1, ffn_dim=self.top_k * self.ffn, vocab_size=2).shape.context(0)
        return drawn(SwiGLU().build(context)).to(self.dtype)


def chosen(tokens: int, experts: int, top_k: int, skew: float, seed: int = 0) -> Tensor:
    """(tokens, top_k) different experts of each token, drawn with odds of 1 / rank^skew; ranks are dealt out at random."""
    generator = torch.Generator().manual_seed(seed)
    rank = torch.randperm(experts, generator=generator)
    if isinf(skew):
        return rank.argsort()[:top_k].expand(tokens, top_k).contiguous()
    noise = -torch.empty(tokens, experts).exponential_(generator=generator).log()
    return (noise - skew * (rank + 1).log()).topk(top_k).indices


def drawn(module: nn.Module) -> nn.Module:
    """Every matrix as at the start of training."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0, 0.02)
    return module


class Given(nn.Module):
    """A router that has made its choice, with weights that need a gradient."""

    def __init__(self, experts: Tensor) -> None:
        super().__init__()
        self.experts = experts
        self.weights = torch.rand(experts.shape, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def forward(self, _x: Tensor, _tokens: Tensor | None) -> Routing:
        return Routing(self.experts, self.weights, None, None)


def loop(x: Tensor, experts: Tensor, weights: Tensor, held: Any, count: int, *_further: Any) -> Tensor:
    """A dispatcher for one process that has no dropped slots: expert after expert."""
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    token = order // experts.shape[1]
    groups = x.index_select(0, token).split(flat.bincount(minlength=count).tolist())
    made = []
    for rows, gate, up, down in zip(groups, held.gate_proj.unbind(), held.up_proj.unbind(), held.down_proj.unbind(), strict=True):
        if len(rows):
            made.append(F.linear(F.silu(F.linear(rows, gate)) * F.linear(rows, up), down))
    weighted = torch.cat(made) * weights.flatten().index_select(0, order).unsqueeze(1)
    return weighted.new_zeros(x.shape).index_add(0, token, weighted).to(x.dtype)


class Rows(TorchDispatchMode):
    """Rows that enter grouped products: `carried` with those of nobody, `computed` those that belong to an expert's group."""

    def __init__(self) -> None:
        super().__init__()
        self.products, self.carried, self.computed = 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            ends = args[2] if len(args) > 2 else (kwargs or {})["offs"]
            self.products += 1
            self.carried += len(args[0])
            self.computed += int(ends[-1])
        return func(*args, **(kwargs or {}))


def waste(case: Case) -> dict[str, float]:
    """Percent of rows that belong to nobody, over rows that belong to somebody."""
    layer = case.layer()
    layer.experts.requires_grad_(False)
    with Rows() as rows:
        _, counted = layer(torch.randn(1, case.tokens, case.dim, dtype=case.dtype))
    assert rows.products == 3 and counted is not None
    slots, dropped = counted[: case.experts], counted[case.experts : 2 * case.experts]
    load = (slots - dropped).long()
    owned = int(load.sum())
    aligned, busiest = int((-(-load // ROWS) * ROWS).sum()), case.experts * int(load.max())
    figures = {
        "computed": rows.computed / 3,
        "carried": rows.carried / 3,
        f"aligned to {ROWS}": aligned,
        "padded to the busiest": busiest,
    }
    return {name: 100 * (figure / owned - 1) for name, figure in figures.items()}


def sides(case: Case) -> tuple[dict[str, Callable[[], Tensor]], list[Tensor]]:
    """Forwards by name, and the leaves whose gradients they make."""
    layer, dense = case.layer(), case.dense()
    x = torch.randn(1, case.tokens, case.dim, generator=torch.Generator().manual_seed(2)).to(case.dtype).requires_grad_()

    def run(dispatch: Any) -> Tensor:
        layer.dispatch = dispatch
        return layer(x)[0]

    ours: Any = layer.dispatch
    forwards = {"grouped": lambda: run(ours), "loop": lambda: run(loop), "dense": lambda: dense(x)}
    assert isinstance(layer.router, Given)
    return forwards, [x, layer.router.weights, *layer.experts.parameters(), *dense.parameters()]


def agree(case: Case) -> None:
    """Fails where grouped product and loop differ by more than rounding, in the output or a gradient.

    Raises:
        SystemExit: naming the largest difference.
    """
    forwards, leaves = sides(case)
    found = {}
    for name in ("grouped", "loop"):
        y = forwards[name]()
        grads = torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True)
        found[name] = [y.detach(), *(grad for grad in grads if grad is not None)]
    worst = max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1e-30))
        for a, b in zip(found["grouped"], found["loop"], strict=True)
    )
    if worst > (1e-4 if case.dtype == torch.float32 else 0.05):
        raise SystemExit(f"{case}: grouped product and loop differ by {worst:.1e}")


def compare(case: Case, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round by side."""
    forwards, leaves = sides(case)
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    slope = torch.randn(1, case.tokens, case.dim).to(case.dtype)
    for number in range(-2, rounds):  # two to warm up
        for name in SIDES if number % 2 else SIDES[::-1]:
            for leaf in leaves:
                leaf.grad = None
            start = clock()
            forwards[name]().backward(slope)
            spent = clock() - start
            if number >= 0:
                seconds[name].append(spent)
    return seconds


def ratio(ours: list[float], theirs: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of ours / theirs, round by round."""
    low, median, high = statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4, method="inclusive")
    return low, median, high


def main() -> None:
    """One line per case, and at the end those where the grouped product is slower."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", default="8,32,64,128,256")
    parser.add_argument("--top-k", default="2,8")
    parser.add_argument("--dtypes", default="bf16,fp32")
    parser.add_argument("--skews", default="0,1,inf")
    parser.add_argument("--capacity", type=float, default=1.25, help="of the second table of waste")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--ffn", type=int, default=256, help="hidden width of one expert")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--smoke", action="store_true", help="whether everything runs; measures nothing")
    options = parser.parse_args()
    if options.smoke:
        options.experts, options.tokens, options.dim, options.ffn, options.rounds = "8,32", 64, 32, 16, 2
    torch.set_num_threads(options.threads)
    print(
        f"torch {torch.__version__}, {options.threads} threads, {options.tokens} tokens, dim {options.dim}, expert {options.ffn}"
    )
    print("grouped: ms; then its time over that of the loop and of the dense layer, median (quartiles)", flush=True)
    experts, top_ks, skews = (
        [kind(text) for text in listed.split(",")]
        for kind, listed in ((int, options.experts), (int, options.top_k), (float, options.skews))
    )
    sizes = [(count, top_k) for count in experts for top_k in top_ks if top_k < count]
    cases, slower = 0, []
    for dtype in options.dtypes.split(","):
        for count, top_k in sizes:
            for skew in skews:
                cases += 1
                case = Case(options.tokens, options.dim, options.ffn, count, top_k, DTYPES[dtype], skew)
                agree(case)
                seconds = compare(case, options.rounds)
                against = {name: ratio(seconds["grouped"], seconds[name]) for name in ("loop", "dense")}
                texts = [f"/ {name} {mid:5.2f} ({low:.2f} to {high:.2f})" for name, (low, mid, high) in against.items()]
                name = f"{dtype} {count:4} experts top-{top_k} skew {skew:3g}"
                print(f"{name}  {1e3 * statistics.median(seconds['grouped']):8.2f} ms  {'  '.join(texts)}", flush=True)
                if against["loop"][1] > 1:
                    slower.append(f"{name}: {against['loop'][1]:.3f} ({against['loop'][0]:.3f} to {against['loop'][2]:.3f})")
    print(f"grouped slower than the loop by the median in {len(slower)} of {cases}")
    for text in slower:
        print(f"  {text}")
    for capacity in (None, options.capacity):
        print(f"waste in percent, {'nothing dropped' if capacity is None else f'capacity {capacity}'}")
        for count, top_k in sizes:
            for skew in skews:
                found = waste(Case(options.tokens, 16, 16, count, top_k, torch.float32, skew, capacity))
                figures = "  ".join(f"{name} {figure:8.1f}" for name, figure in found.items())
                print(f"{count:9} experts top-{top_k} skew {skew:3g}  {figures}", flush=True)


if __name__ == "__main__":
    main()
