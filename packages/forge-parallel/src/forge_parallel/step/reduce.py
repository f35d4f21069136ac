"""The numbers of a step that are summed over all ranks, in two small all-reduces; gradient norm, clipping and losses by
source.

Before the first forward: the number of valid tokens of the whole step. After the backward: one packed sum of the squared
gradient norm, the losses and the stop requests. So no two ranks can see different ones. Models that count something over a
step add an all-reduce before and after it (`step_statistics`), and a pipeline exchanges the names of its metrics once.
"""

from collections.abc import Iterable, Sequence

import torch
from torch.distributed.tensor import DTensor

from forge_core.batch import IGNORE, Batch
from forge_core.errors import ForgeError
from forge_core.protocols.model import LossTerms, Observer
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.placement.boxes import owns
from forge_parallel.placement.topology import Topology
from forge_parallel.torch_private import foreach_mul_, foreach_norm


def valid_tokens(batches: Iterable[Batch], topology: Topology) -> torch.Tensor:
    """Collective: scalar int64, labels with a loss in all micro-batches of all data ranks."""
    counts = [(batch.labels != IGNORE).sum() for batch in batches]
    count = torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.int64, device=topology.device)
    # Ranks that share rows (tensor and pipeline ranks) read the same labels; one of them speaks for all.
    at = topology.coordinates
    return topology.all_reduce(count if at["tp"] == 0 and at["pp"] == 0 else torch.zeros_like(count))


def reports(model: ParallelModel) -> bool:
    """Whether this rank's losses are counted: of the ranks that read the same rows, the first one with the last part."""
    return model.scores and model.topology.coordinates["tp"] == 0


def local_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """This rank's box of the gradient."""
    gradient = parameter.grad
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def squared_grad_norm(model: ParallelModel) -> torch.Tensor:
    """Scalar fp64 on the device: sum of squares of the gradient elements that this rank owns; over the world, of the whole."""
    owned = [parameter for _, parameter, _ in model.trainable() if owns(parameter, model.topology)]
    gradients = [gradient for parameter in owned if (gradient := local_grad(parameter)) is not None and gradient.numel()]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=model.topology.device)
    norms = foreach_norm(gradients)
    return torch.stack([norm.double() for norm in norms]).square().sum().to(model.topology.device)


def world_sum(values: Sequence[torch.Tensor], topology: Topology) -> list[torch.Tensor]:
    """Collective: sums tensors over the world in one all-reduce, in fp64. Their shapes are the same on every rank."""
    packed = topology.all_reduce(torch.cat([value.detach().double().flatten() for value in values]))
    parts = packed.split([value.numel() for value in values])
    return [part.view(value.shape) for part, value in zip(parts, values, strict=True)]


@torch.no_grad()
def clip_grad_norm(model: ParallelModel, norm: torch.Tensor, limit: float) -> torch.Tensor:
    """Scales all gradients by min(1, limit / norm) and returns that coefficient, without a host synchronization unless
    gradients lie on the host.

    `norm` is the global 2-norm; where it is not finite the step is skipped anyway.
    """
    coefficient = (limit / (norm + 1e-6)).clamp(max=1.0)
    gradients = [gradient for _, parameter, _ in model.trainable() if (gradient := local_grad(parameter)) is not None]
    if gradients:
        foreach_mul_(gradients, coefficient.to(gradients[0].device, gradients[0].dtype))
    return coefficient


def sources_of(batches: Sequence[Batch]) -> tuple[str, ...]:
    """Names of the sources of the data; none where the batches do not say.

    Raises:
        ForgeError: micro-batches of one step disagree.
    """
    found = {() if batch.sources is None else batch.sources.names for batch in batches}
    if len(found) > 1:
        raise ForgeError(f"micro-batches of one step name different sources: {sorted(found)}; give all of them the same names")
    return found.pop() if found else ()


def sums_by_source(batches: Sequence[Batch], terms: Sequence[LossTerms], device: torch.device) -> torch.Tensor:
    """(2, sources) fp64: loss and valid tokens of each source in this rank's micro-batches; zeros where no row is counted.

    Raises:
        ForgeError: the objective's rows are not those of the batch.
    """
    total = torch.zeros(2, len(sources_of(batches)), dtype=torch.float64, device=device)
    if any(term.rows is None for term in terms):
        return total
    for batch, term in zip(batches, terms, strict=True):
        if batch.sources is None or term.rows is None:
            continue
        if term.rows.shape != batch.sources.rows.shape:
            raise ForgeError(
                f"the objective's `rows` have shape {tuple(term.rows.shape)}, but the batch has {len(batch.sources.rows)} rows; "
                "they are what each row adds to the sum"
            )
        counts = (batch.labels != IGNORE).flatten(1).sum(1)
        # By index, not by a product with zeros: a loss that is not finite stays with its source.
        total.index_add_(1, batch.sources.rows, torch.stack((term.rows.double(), counts.double())))
    return total


def loss_shares(names: Sequence[str], losses: Sequence[float], counts: Sequence[float], tokens: float) -> dict[str, float]:
    """`source/NAME/loss`, the mean over its valid tokens in nats, and `source/NAME/tokens` of each source that has any.

    Nothing where the sources do not account for every token: then some rank's objective did not count rows.
    """
    if sum(counts) != tokens:
        return {}
    return {
        f"source/{name}/{what}": value
        for name, loss, count in zip(names, losses, counts, strict=True)
        if count
        for what, value in (("loss", loss / count), ("tokens", count))
    }


def observers(model: ParallelModel) -> tuple[Observer, ...]:
    """The observers of this rank's parts in the order of their modules."""
    return tuple(module for part in model.parts for module in part.modules() if isinstance(module, Observer))


def begin_statistics(found: Sequence[Observer], model: ParallelModel, batches: Sequence[Batch]) -> None:
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
def finish_statistics(found: Sequence[Observer], model: ParallelModel, skip: torch.Tensor) -> None:
    """Collective: after the last backward; `skip` is 1 where there will be no update. All counts cross ranks in one all-reduce.

    Tensor parallel ranks see different tokens, too: without sequence parallelism such models are refused.
    """
    if not found:
        return
    mine = [observer.statistics() for observer in found]
    packed = model.topology.stage_sum(torch.cat(mine))
    for observer, totals in zip(found, packed.split([len(each) for each in mine]), strict=True):
        observer.after_step(totals, skip)
