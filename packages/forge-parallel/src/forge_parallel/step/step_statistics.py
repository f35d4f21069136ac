"""Modules that keep count over a step, such as layers of experts: told before it what a token weighs, and after it what all
ranks counted together. Models without such modules exchange nothing here.

Ranks of one pipeline stage hold the same ones, and agree among themselves: every stage sees all tokens.
"""

from collections.abc import Sequence

import torch

from forge_core.batch import Batch
from forge_core.protocols.model import Observer
from forge_parallel.build.parallel_model import ParallelModel


def observers(model: ParallelModel) -> tuple[Observer, ...]:
    """The observers of this rank's parts in the order of their modules."""
    return tuple(module for part in model.parts for module in part.modules() if isinstance(module, Observer))


def begin(found: Sequence[Observer], model: ParallelModel, batches: Sequence[Batch]) -> None:
    """Collective: before the first forward of a step, whose micro-batches on this rank are `batches`; one all-reduce."""
    if not found:
        return
    topology = model.topology
    counts = [
        torch.full((), batch.tokens.numel(), dtype=torch.int64, device=topology.device) if real is None else real.sum()
        for batch, real in ((batch, batch.real) for batch in batches)
    ]
    count = torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.int64, device=topology.device)
    count = topology.stage_sum(count if topology.coordinates["tp"] == 0 else torch.zeros_like(count))
    for observer in found:
        observer.before_step(1 / count.clamp(min=1).double())


@torch.no_grad()
def finish(found: Sequence[Observer], model: ParallelModel, skip: torch.Tensor) -> None:
    """Collective: after the last backward; `skip` is 1 where there will be no update. All counts cross ranks in one all-reduce.

    Tensor parallel ranks see different tokens, too: without sequence parallelism such models are refused.
    """
    if not found:
        return
    mine = [observer.statistics() for observer in found]
    packed = model.topology.stage_sum(torch.cat(mine))
    for observer, totals in zip(found, packed.split([len(each) for each in mine]), strict=True):
        observer.after_step(totals, skip)
