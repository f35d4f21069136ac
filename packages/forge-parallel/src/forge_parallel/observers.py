"""Modules that keep count over a step, such as layers of experts: told before it what a token weighs, and after it what all
ranks counted together. Models without such modules exchange nothing here.

Every rank must hold the same ones, which ranks of a pipeline do not: with one, models that have any are refused.
"""

from collections.abc import Sequence

import torch

from forge_core.batch import PADDING, Batch
from forge_core.errors import PlanError
from forge_core.protocols.model import Observer
from forge_parallel.model import ParallelModel


def observers(model: ParallelModel) -> tuple[Observer, ...]:
    """The observers of a model in the order of its modules.

    Raises:
        PlanError: there are some, and a pipeline.
    """
    found = tuple(module for part in model.parts for module in part.modules() if isinstance(module, Observer))
    if found and model.topology.layout.pp > 1:
        raise PlanError("layers that balance themselves, such as experts, are not implemented with parallel.pp > 1")
    return found


def begin(found: Sequence[Observer], model: ParallelModel, batches: Sequence[Batch]) -> None:
    """Before the first forward of a step, whose micro-batches on this rank are `batches`; one all-reduce."""
    if not found:
        return
    topology = model.topology
    counts = [
        torch.full((), batch.tokens.numel(), dtype=torch.int64, device=topology.device)
        if batch.documents is None
        else (batch.documents != PADDING).sum()
        for batch in batches
    ]
    count = torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.int64, device=topology.device)
    count = topology.all_reduce(count if topology.coordinates["tp"] == 0 else torch.zeros_like(count))
    for observer in found:
        observer.before_step(1 / count.clamp(min=1).double())


@torch.no_grad()
def finish(found: Sequence[Observer], model: ParallelModel, skip: torch.Tensor) -> None:
    """After the last backward; `skip` is 1 where there will be no update. All counts cross ranks in one all-reduce."""
    if not found:
        return
    topology = model.topology
    mine = [observer.statistics() for observer in found]
    packed = torch.cat(mine)
    packed = topology.all_reduce(packed if topology.coordinates["tp"] == 0 else torch.zeros_like(packed))
    for observer, totals in zip(found, packed.split([len(each) for each in mine]), strict=True):
        observer.after_step(totals, skip)
