"""Bytes that a rank sends in a step, per axis, over the least that would do; counted in a fake world, so exact on any machine.

    python benchmarks/parallel/bytes.py [--layouts dp8,hsdp4x8] [--micro-batches 1,4] [--kinds ring] [--shape 1b] [--even]

Layouts with cp are counted with every kind of attention over cut rows; a line named `cp` has what sharding exchanges over these
ranks in it, too. The shape is that of a preset's model in fewer layers, which changes no ratio by much. `--even` takes a
vocabulary that divides, so that what is left above 1 is not padding.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

from forge_core.layout import Layout
from forge_core.registry import Registry
from forge_parallel.dryrun.estimate import Workload, dry_run
from forge_parallel.model.plan import Plan
from forge_parallel.transforms.context.transform import ContextParallel, Kind
from forge_train.plan import plan_of
from forge_train.recipe.load import load_recipe

LAYOUTS = "dp8,dp64,hsdp8x8,hsdp2x1,dp512,tp2,tp8,dp8tp8,cp2,cp8,dp8cp4,dp2cp4tp2"
KINDS = ",".join(get_args(Kind))


def workload(job: Any, layers: int, length: int, micro_batches: int, even: bool) -> Workload:
    """The recipe's model with fewer layers and shorter rows."""
    model = replace(job.model, layers=layers, vocab_size=131072 if even else job.model.vocab_size)
    return Workload(
        model.build,
        job.objective.build(),
        job.optimizer.build,
        1,
        length,
        micro_batches,
        job.precision.compute,
        job.precision.state,
    )


def variants(plan: Plan, kinds: list[str]) -> Iterator[tuple[str, Plan]]:
    """The plan with each kind of attention, where rows are cut."""
    if plan.layout.cp == 1:
        yield "", plan
        return
    for kind in kinds:
        transforms = [replace(one, kind=kind) if isinstance(one, ContextParallel) else one for one in plan.transforms]
        yield f" {kind}", Plan.of(transforms, plan.layout, plan.pipeline)


def main() -> None:
    """One line per layout, number of micro-batches, axis and collective."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", default=LAYOUTS)
    parser.add_argument("--micro-batches", default="1,4")
    parser.add_argument("--kinds", default=KINDS, help="of attention over cut rows")
    parser.add_argument("--shape", default="1b", help="a preset")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--even", action="store_true")
    options = parser.parse_args()
    registry = Registry()
    job = load_recipe(options.shape, registry=registry).job
    heads = f"{'axis':12} {'collective':14} {'calls':>6} {'sent MiB':>10} {'least MiB':>10} {'ratio':>7}"
    print(f"{'layout':>20} {'micro-batches':>13}  {heads}")
    for text in options.layouts.split(","):
        layout = Layout.parse(text)
        for kind, plan in variants(plan_of(job, layout, registry), options.kinds.split(",")):
            for count in map(int, options.micro_batches.split(",")):
                estimate = dry_run(workload(job, options.layers, options.length, count, options.even), plan)
                sent = {(flow.axis, flow.kind): flow for flow in estimate.flows}
                for bound in estimate.bounds:
                    flow = sent[bound.axis, bound.kind]
                    figures = f"{flow.wire / 2**20:10.1f} {bound.wire / 2**20:10.1f} {flow.wire / bound.wire:7.4f}"
                    named = f"{text + kind:>20} {count:13}  {flow.axis:12}"
                    print(f"{named} {flow.kind:14} {flow.count:6} {figures}", flush=True)


if __name__ == "__main__":
    main()
