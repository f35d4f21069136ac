"""Operations and bytes of Muon over all ranks, against one process and the least that would do; counted in a fake world, exactly.

    python benchmarks/parallel/muon.py [--shape 1b] [--layers 4] [--layouts dp8,hsdp2x4,dp4tp2] [--smoke]

The real optimizer steps on tensors without memory, rank by rank. Operations are counted by torch, in its products. The least
bytes: every matrix goes to the rank that already has most of it, and every rank gets what it holds; nothing is balanced then. A
preset with experts takes layouts with ep.
"""

import argparse
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.flop_counter import FlopCounterMode

from forge_core.layout import Layout
from forge_core.registry import Registry
from forge_parallel.dryrun.estimate import Workload, dry_run
from forge_parallel.dryrun.traffic import Traffic
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.optim.optimizers import MuonConfig
from forge_parallel.optim.whole_matrices import matrices_of, overlap
from forge_parallel.placement.boxes import span_on
from forge_train.plan import plan_of
from forge_train.recipe.load import load_recipe


@dataclass
class Counted:
    """The optimizer of one rank, which notes its newest step."""

    model: ParallelModel
    flops: int = 0
    sent: int = 0
    matrices: int = 0
    inner: Any = field(init=False)

    def __post_init__(self) -> None:
        self.inner = MuonConfig().build(self.model)
        self.matrices = len(self.inner._matrices.owned)

    def step(self, skip: Any = None) -> None:
        with FlopCounterMode(display=False) as counter, Traffic(self.model.topology.layout) as traffic:
            self.inner.step(skip)
        self.flops = counter.get_total_flops()
        self.sent = sum(flow.wire for flow in traffic.flows())

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def state(self) -> Any:
        return self.inner.state()


def least(model: ParallelModel, size: int) -> int:
    """Bytes of numbers of `size` that have to travel between the ranks of this one's pipeline stages."""
    layout, total = model.topology.layout, 0
    ranks = next(group for group in layout.groups(("dp_replicate", "dp_shard", "cp", "tp")) if model.topology.rank in group)
    for name, tensor, group in model.trainable():
        if group != "matrix":
            continue
        spans = [span_on(tensor, layout, rank) for rank in ranks]
        for matrix in matrices_of(name, tensor.shape, model.specs.tensors[name]):
            held = [0 if (part := overlap(matrix, span)) is None else part.extent[-1] * part.extent[-2] for span in spans]
            total += matrix.elements - max(held) + sum(held) - max(held)
    return total * size


def measured(job: Any, layout: Layout, registry: Registry, layers: int) -> tuple[list[Counted], int]:
    """Every rank's count, and the least bytes over all."""
    found: list[Counted] = []
    bound: list[int] = []

    def optimizer(model: ParallelModel) -> Any:
        found.append(Counted(model))
        if model.topology.rank % (layout.world // layout.pp) == 0:
            bound.append(least(model, 2))
        return found[-1]

    model = replace(job.model, layers=layers)
    length = 16 * layout.tp * layout.cp
    workload = Workload(model.build, job.objective.build(), optimizer, 1, length, 1, job.precision.compute, "fp32")
    plan = plan_of(job, layout, registry)
    for rank in range(layout.world):
        dry_run(workload, plan, rank)
    return found, sum(bound)


def main() -> None:
    """One line per layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1b", help="a preset")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--layouts", default="dp2,dp8,hsdp2x4,dp4tp2,tp2")
    parser.add_argument("--smoke", action="store_true", help="a tiny model")
    options = parser.parse_args()
    registry = Registry()
    job: Any = load_recipe("debug" if options.smoke else options.shape, registry=registry).job
    layers = min(options.layers, job.model.layers)
    (alone,), _ = measured(job, Layout(), registry, layers)
    print(
        f"{'layout':>14} {'matrices':>9} {'operations':>11} {'busiest rank':>13} {'sent MiB':>10} {'least MiB':>10} {'ratio':>7}"
    )
    print("operations of all ranks over those of one process; of the busiest rank over an even share")
    for text in ["dp2", "dp2tp2", "hsdp2x2"] if options.smoke else options.layouts.split(","):
        layout = Layout.parse(text)
        ranks, bound = measured(job, layout, registry, layers)
        total, sent = sum(rank.flops for rank in ranks), sum(rank.sent for rank in ranks)
        busiest = max(rank.flops for rank in ranks) * len(ranks) / total
        shown = f"{sum(rank.matrices for rank in ranks):9} {total / alone.flops:11.4f} {busiest:13.4f}"
        print(f"{text:>14} {shown} {sent / 2**20:10.1f} {bound / 2**20:10.1f} {sent / bound:7.4f}", flush=True)


if __name__ == "__main__":
    main()
