"""Which box of a global tensor a rank holds."""

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True)
class Box:
    """The part of a global tensor of `shape` that starts at `offset` and is held in `local`."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: torch.Tensor


def local_box(tensor: torch.Tensor) -> Box:
    """The box of this rank. A plain tensor is held whole. `local` shares memory with `tensor`."""
    if not isinstance(tensor, DTensor):
        return Box(tuple(tensor.shape), (0,) * tensor.dim(), tensor.detach())
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local = tensor.to_local().detach()
    if tuple(shape) != tuple(local.shape):
        raise AssertionError(f"torch reports a local shape {tuple(shape)} but holds {tuple(local.shape)}")
    # An empty shard may be placed beyond the end of the tensor; its offset means nothing then.
    within = tuple(min(start, size) for start, size in zip(offset, tensor.shape, strict=True))
    return Box(tuple(tensor.shape), within, local)
