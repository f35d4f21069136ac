"""Sums over all ranks in a step, in two small all-reduces; gradient norm, gradient clipping and losses by source.

Before the first forward, the number of valid tokens of the step is summed. After the backward, one packed all-reduce sums the
squared gradient norm, the losses and the stop requests, so all ranks see the same values. Models that count statistics add one
all-reduce before and one after the step, and a pipeline exchanges the names of its metrics once.
"""

from collections.abc import Iterable, Sequence

import torch
from torch.distributed.tensor import DTensor

from forge_core.batch import IGNORE, Batch
from forge_core.errors import ForgeError
from forge_core.protocols.model import LossTerms, Objective, Observer
from forge_parallel.model.parallel_model import ParallelModel
from forge_parallel.placement.topology import Topology
from forge_parallel.torch_private import foreach_mul_, foreach_norm


def summands(objective: Objective, batch: Batch) -> torch.Tensor:
    """Returns (B,) int64: the number of summands of each row in the objective's sum, by default its labels."""
    counts = getattr(objective, "counts", None)
    return (batch.labels != IGNORE).flatten(1).sum(1) if counts is None else counts(batch)


def bound(objective: Objective, batch: Batch) -> Objective:
    """Returns the objective for one micro-batch of this rank; see `forge_core.protocols.model.BatchObjective`."""
    bind = getattr(objective, "bound", None)
    return objective if bind is None else bind(batch)


def valid_tokens(batches: Iterable[Batch], topology: Topology, objective: Objective) -> torch.Tensor:
    """Collective: returns the number of summands of the loss, by default labels, in all micro-batches of all data ranks, a scalar
    int64."""
    counts = [summands(objective, batch).sum() for batch in batches]
    count = torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.int64, device=topology.device)
    # Tensor-parallel ranks and pipeline ranks read the same labels, so only one of them counts.
    at = topology.coordinates
    return topology.all_reduce(count if at["tp"] == 0 and at["pp"] == 0 else torch.zeros_like(count))


def reports(model: ParallelModel) -> bool:
    """True on one rank per set of rows, for which losses are counted: the first tensor-parallel rank of the last stage."""
    return model.scores and model.topology.coordinates["tp"] == 0


def local_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """Returns this rank's part of the gradient.

    DTensor may return a gradient whole, though its parameter is sharded: torch 2.11 does for a width that does not divide. Such a
    gradient is cut like its parameter, which needs no communication, so that no norm counts it on every rank.

    Raises:
        ForgeError: the gradient is a sum that ranks have not added up.
    """
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return gradient
    assert isinstance(parameter, DTensor), "the gradient of a local tensor is local"
    if gradient.placements != parameter.placements:
        pairs = list(zip(gradient.placements, parameter.placements, strict=True))
        if any(found.is_partial() for found, _ in pairs):
            raise ForgeError(f"a gradient has the placements {gradient.placements}: ranks have not added it up")
        if any(found.is_replicate() and not wanted.is_replicate() for found, wanted in pairs):
            parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
    return gradient.to_local()


def squared_grad_norm(model: ParallelModel) -> torch.Tensor:
    """Returns the sum of squares of the gradient elements that this rank owns, a scalar fp64 on the device; the sum over all
    ranks is that of the whole gradient."""
    owned = [parameter for name, parameter, _ in model.trainable() if name in model.owned]
    gradients = [gradient for parameter in owned if (gradient := local_grad(parameter)) is not None and gradient.numel()]
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=model.topology.device)
    norms = foreach_norm(gradients)
    return torch.stack([norm.double() for norm in norms]).square().sum().to(model.topology.device)


def world_sum(values: Sequence[torch.Tensor], topology: Topology) -> list[torch.Tensor]:
    """Collective: sums tensors over the world in one all-reduce, in fp64. Shapes must be the same on every rank."""
    packed = topology.all_reduce(torch.cat([value.detach().double().flatten() for value in values]))
    parts = packed.split([value.numel() for value in values])
    return [part.view(value.shape) for part, value in zip(parts, values, strict=True)]


@torch.no_grad()
def clip_grad_norm(model: ParallelModel, norm: torch.Tensor, limit: float) -> torch.Tensor:
    """Scales all gradients by min(1, limit / norm) and returns this coefficient. Synchronizes only for gradients on the host.

    `norm` is the global 2-norm. If it is not finite, the step is skipped anyway.
    """
    coefficient = (limit / (norm + 1e-6)).clamp(max=1.0)
    gradients = [gradient for _, parameter, _ in model.trainable() if (gradient := local_grad(parameter)) is not None]
    if gradients:
        foreach_mul_(gradients, coefficient.to(gradients[0].device, gradients[0].dtype))
    return coefficient


def sources_of(batches: Sequence[Batch]) -> tuple[str, ...]:
    """Returns the names of the data sources; an empty tuple if the batches do not name any.

    Raises:
        ForgeError: micro-batches of one step name different sources.
    """
    names = {() if batch.sources is None else batch.sources.names for batch in batches}
    if len(names) > 1:
        raise ForgeError(f"micro-batches of one step name different sources: {sorted(names)}; give all of them the same names")
    return names.pop() if names else ()


def sums_by_source(
    batches: Sequence[Batch], terms: Sequence[LossTerms], device: torch.device, objective: Objective
) -> torch.Tensor:
    """Returns loss and valid tokens of each source in this rank's micro-batches, (2, sources) fp64; zeros if the objective does
    not return losses of rows.

    Raises:
        ForgeError: the objective returns losses for another number of rows than the batch has.
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
                "return the summed loss of each row"
            )
        counts = summands(objective, batch)
        # By index, not as a product with a mask: 0 * inf would spread a non-finite loss to other sources.
        total.index_add_(1, batch.sources.rows, torch.stack((term.rows.double(), counts.double())))
    return total


def loss_shares(names: Sequence[str], losses: Sequence[float], counts: Sequence[float], tokens: float) -> dict[str, float]:
    """Returns, for each source with valid tokens, `source/NAME/loss`, its mean loss in nats, and `source/NAME/tokens`.

    Returns an empty dict if the sources do not account for every token: then an objective did not return losses of rows.
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
    """Returns the observers among this rank's modules, in order."""
    return tuple(module for part in model.parts for module in part.modules() if isinstance(module, Observer))


def begin_statistics(found: Sequence[Observer], model: ParallelModel, batches: Sequence[Batch]) -> None:
    """Collective: prepares observers before the first forward of a step with micro-batches `batches`; one all-reduce."""
    if not found:
        return
    topology = model.topology
    counts = [
        torch.full((), batch.tokens.numel(), dtype=torch.int64, device=topology.device) if real is None else real.sum()
        for batch, real in ((batch, batch.real) for batch in batches)
    ]
    count = torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.int64, device=topology.device)
    count = topology.stage_sum(count if topology.coordinates["tp"] == 0 else torch.zeros_like(count))
    scale = 1 / count.clamp(min=1).double()
    for observer in found:
        observer.before_step(scale)


@torch.no_grad()
def finish_statistics(found: Sequence[Observer], model: ParallelModel, skip: torch.Tensor) -> None:
    """Collective: sums the observers' statistics after the last backward, in one all-reduce; `skip` is 1 if the update is
    skipped.

    Tensor-parallel ranks see different tokens as well, because models with observers need sequence parallelism.
    """
    if not found:
        return
    statistics = [observer.statistics() for observer in found]
    packed = model.topology.stage_sum(torch.cat(statistics))
    for observer, totals in zip(found, packed.split([len(counts) for counts in statistics]), strict=True):
        observer.after_step(totals, skip)
