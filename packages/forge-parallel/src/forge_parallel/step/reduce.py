"""The numbers of a step that are summed over the world, in two all-reduces.

Before the first forward: the number of valid tokens of the whole step. After the backward: one packed sum of the squared
gradient norm, the losses and the stop requests. So no two ranks can see different ones. Models that keep count over a step add
an all-reduce before and after it (`step.step_statistics`), and a pipeline tells its metrics' names once.
"""

from collections.abc import Iterable, Sequence

import torch
from torch.distributed.tensor import DTensor

from forge_core.batch import IGNORE, Batch
from forge_parallel.build.parallel_model import ParallelModel
from forge_parallel.placement.owner import owns
from forge_parallel.placement.topology import Topology
from forge_parallel.torch_private import foreach_norm


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
