"""The state of a parallelized module: what one rank may write to a file, and what it may read from one.

A rank's `state_dict` holds its shares only. A file with the shares of one rank looks like a file of the model: its DTensors have
the global shapes. So pickling a share is refused, and so is loading one that another rank saved.
"""

from collections.abc import Iterable
from typing import Any, Never

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from forge_core.errors import PlanError
from forge_parallel.placement.boxes import local_box

HOW_TO_SAVE = (
    "write state = model.state_dict(whole=True) on all ranks and save it on one, or "
    "torch.distributed.checkpoint.save(model.state_dict(), checkpoint_id=...) on all ranks"
)
"""The remedy in errors about files."""


def refuse_pickle(*_: Any) -> Never:
    """Raises the error for an attempt to pickle one rank's share, for example with `torch.save`.

    Raises:
        PlanError: always.
    """
    raise PlanError(f"torch.save: this rank has only its share of the parallelized module; {HOW_TO_SAVE}")


def mark_shares(tensors: Iterable[Any]) -> None:
    """Makes pickling these tensors, and their deep copies, an error. Copies into another tensor are not marked."""
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            tensor.__reduce_ex__ = refuse_pickle  # type: ignore[method-assign]  # pickle looks the method up in the object


def equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal; of DTensors that are sharded alike, this rank's shares. `torch.equal` would communicate with
    all ranks, also with those of other pipeline stages, which do not have these tensors."""
    if isinstance(one, DTensor) and isinstance(other, DTensor) and _sharding(one) == _sharding(other):
        return torch.equal(local_box(one).local, local_box(other).local)
    whole = [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in (one, other)]
    return torch.equal(*whole)


def _sharding(tensor: DTensor) -> tuple[Any, ...]:
    return tensor.device_mesh, tensor.placements


def local_values(name: str, value: Tensor, target: Tensor) -> Tensor:
    """Returns the values of `value`, a whole tensor or a DTensor, that belong into this rank's share `target`. Collective if
    `value` is sharded in another way than `target`.

    Raises:
        PlanError: `value` is the share of another rank.
    """
    box = local_box(target)
    if not isinstance(value, DTensor):
        return box.within(value.reshape(box.shape))
    mesh = value.device_mesh
    here = (mesh.mesh == dist.get_rank()).nonzero().flatten().tolist()
    there = mesh.get_coordinate()
    if list(there or ()) != here:
        raise PlanError(
            f"load_state_dict: {name} is the share of rank {int(mesh.mesh[tuple(there)]) if there else '?'}, but this is rank "
            f"{dist.get_rank()}; {HOW_TO_SAVE}"
        )
    if isinstance(target, DTensor) and mesh == target.device_mesh and value.placements == target.placements:
        return local_box(value).local
    return box.within(value.full_tensor().reshape(box.shape))
