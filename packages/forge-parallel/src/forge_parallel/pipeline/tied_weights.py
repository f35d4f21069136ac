"""Tied tensors whose copy is on another stage than the original.

The copy is a follower. Before a step or an evaluation it takes the original's value; after the step's last backward its
gradient goes to the rank of the original, with the same coordinates on all other axes, and is added there. Both are laid
out alike, so what moves is one local box.
"""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from forge_core.errors import PlanError
from forge_parallel.pipeline.stages import StageSplit
from forge_parallel.placement.boxes import local_box
from forge_parallel.placement.topology import Topology

Named = Mapping[str, torch.Tensor]
"""Tensors of this rank by global name, copies included."""


@torch.no_grad()
def refresh(cut: StageSplit, tensors: Named, topology: Topology) -> None:
    """Collective: gives every follower the value of its original; all ranks of pp enter."""
    for one in cut.followers:
        _move(
            cut,
            tensors,
            topology,
            (one.original_stage, one.copy_stage),
            lambda name=one.original: _local(tensors[name]),
            lambda value, name=one.copy: _local(tensors[name]).copy_(value),
            one.copy,
        )


@torch.no_grad()
def add_gradients(cut: StageSplit, tensors: Named, topology: Topology) -> None:
    """Collective: adds every follower's gradient to that of its original, and clears it; all ranks of pp enter."""
    for one in cut.followers:
        _move(
            cut,
            tensors,
            topology,
            (one.copy_stage, one.original_stage),
            lambda name=one.copy: _taken(tensors[name]),
            lambda value, name=one.original: _add(tensors[name], value),
            one.original,
        )


def check(cut: StageSplit, tensors: Named, shapes: Mapping[str, tuple[int, ...]], topology: Topology) -> None:
    """Collective: compares where copies and originals are cut; all ranks of pp enter, and all see the same.

    Raises:
        PlanError: a transform laid them out differently.
    """
    for one in cut.followers:
        boxes = torch.zeros(2, 3 * len(shapes[one.original]), dtype=torch.int64, device=topology.device)
        for row, name, stage in ((0, one.copy, one.copy_stage), (1, one.original, one.original_stage)):
            if stage in cut.local:
                box = local_box(tensors[name])
                boxes[row] = torch.tensor([*box.shape, *box.offset, *box.local.shape])
        dist.all_reduce(boxes, group=topology.group("pp"))
        if not torch.equal(boxes[0], boxes[1]):
            raise PlanError(f"{one.copy} and {one.original} are tied, but a transform laid them out differently")


def _move(
    cut: StageSplit,
    tensors: Named,
    topology: Topology,
    stages: tuple[int, int],
    give: Callable[[], torch.Tensor],
    take: Callable[[torch.Tensor], object],
    like: str,
) -> None:
    """Brings `give()` from the first stage's rank to `take` on the second's, where it looks as the tensor `like`."""
    source, target = (cut.placement[stage] for stage in stages)
    if source == target:
        if source == cut.rank:
            take(give())
        return
    if cut.rank not in (source, target):
        return
    group, device = topology.group("pp"), topology.device
    if cut.rank == source:
        dist.send(give().contiguous().to(device), dist.get_global_rank(group, target), group)
    else:
        here = _local(tensors[like])
        value = torch.empty_like(here, memory_format=torch.contiguous_format, device=device)
        dist.recv(value, dist.get_global_rank(group, source), group)
        take(value.to(here.device))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _taken(tensor: torch.Tensor) -> torch.Tensor:
    """The local gradient, which the tensor loses; zeros where there is none."""
    gradient, tensor.grad = tensor.grad, None
    return torch.zeros_like(_local(tensor)) if gradient is None else _local(gradient)


def _add(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if not tensor.requires_grad:
        return
    if tensor.grad is None:
        tensor.grad = torch.zeros_like(tensor)
    _local(tensor.grad).add_(value)
