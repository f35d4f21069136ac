"""Tied tensors whose copy is on another stage than the original.

The copy is a follower. Before a step or an evaluation it takes the original's value; after the step's last backward its
gradient goes to the rank of the original, with the same coordinates on all other axes, and is added there. Both are laid
out alike, so what moves is one local box.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from forge_core.errors import PlanError
from forge_parallel.placement.boxes import local_box

if TYPE_CHECKING:
    from forge_parallel.build.parallel_model import ParallelModel
    from forge_parallel.pipeline.stages import Follower


@torch.no_grad()
def refresh(model: "ParallelModel") -> None:
    """Gives every follower the value of its original; all ranks of pp enter."""
    for one in _followers(model):
        _move(
            model,
            (one.original_stage, one.copy_stage),
            lambda name=one.original: _local(model.everything[name]),
            lambda value, name=one.copy: _local(model.everything[name]).copy_(value),
            one.copy,
        )


@torch.no_grad()
def add_gradients(model: "ParallelModel") -> None:
    """Adds every follower's gradient to that of its original, and clears it; all ranks of pp enter."""
    for one in _followers(model):
        _move(
            model,
            (one.copy_stage, one.original_stage),
            lambda name=one.copy: _taken(model.everything[name]),
            lambda value, name=one.original: _add(model.everything[name], value),
            one.original,
        )


def check(model: "ParallelModel") -> None:
    """Compares where copies and originals are cut; all ranks of pp enter, and all see the same.

    Raises:
        PlanError: a transform laid them out differently.
    """
    for one in _followers(model):
        assert model.cut is not None
        boxes = torch.zeros(2, 3 * len(model.shapes[one.original]), dtype=torch.int64, device=model.topology.device)
        for row, name, stage in ((0, one.copy, one.copy_stage), (1, one.original, one.original_stage)):
            if stage in model.cut.local:
                box = local_box(model.everything[name])
                boxes[row] = torch.tensor([*box.shape, *box.offset, *box.local.shape])
        dist.all_reduce(boxes, group=model.topology.group("pp"))
        if not torch.equal(boxes[0], boxes[1]):
            raise PlanError(f"{one.copy} and {one.original} are tied, but a transform laid them out differently")


def _followers(model: "ParallelModel") -> "tuple[Follower, ...]":
    return () if model.cut is None else model.cut.followers


def _move(
    model: "ParallelModel",
    stages: tuple[int, int],
    give: Callable[[], torch.Tensor],
    take: Callable[[torch.Tensor], object],
    like: str,
) -> None:
    """Brings `give()` from the first stage's rank to `take` on the second's, where it looks as the tensor `like`."""
    cut = model.cut
    assert cut is not None
    source, target = (cut.placement[stage] for stage in stages)
    if source == target:
        if source == cut.rank:
            take(give())
        return
    if cut.rank not in (source, target):
        return
    group, device = model.topology.group("pp"), model.topology.device
    if cut.rank == source:
        dist.send(give().contiguous().to(device), dist.get_global_rank(group, target), group)
    else:
        here = _local(model.everything[like])
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
