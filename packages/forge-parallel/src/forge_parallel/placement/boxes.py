"""Which box of a global tensor a rank holds."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement, Shard

from forge_parallel.placement.shares import chunk
from forge_parallel.torch_private import StridedShard


@dataclass(frozen=True)
class Box:
    """The part of a global tensor of `shape` that starts at `offset` and is held in `local`."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: torch.Tensor

    def within(self, whole: torch.Tensor) -> torch.Tensor:
        """The view of `whole`, a tensor of the global shape, that this box is."""
        extents = zip(self.offset, self.local.shape, strict=True)
        return whole[tuple(slice(start, start + size) for start, size in extents)]


def local_box(tensor: torch.Tensor) -> Box:
    """The box of this rank. A plain tensor is held whole. `local` shares memory with `tensor`."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Box(shape, (0,) * tensor.dim(), tensor.detach())
    mesh, local = tensor.device_mesh, plain(tensor.to_local()).detach()
    at = mesh.get_coordinate()
    assert at is not None, "a tensor lives on the mesh of its rank"
    offset, extent = [0] * tensor.dim(), list(shape)
    for axis, dim in _cuts(tensor.placements):
        start, size = chunk(extent[dim], mesh.size(axis), at[axis])
        offset[dim], extent[dim] = offset[dim] + start, size
    if tuple(extent) != tuple(local.shape):
        raise AssertionError(f"{tensor.placements} of {shape} should give {tuple(extent)}, but torch holds {tuple(local.shape)}")
    return Box(shape, tuple(offset), local)


def plain(local: torch.Tensor) -> torch.Tensor:
    """The numbers that a rank holds: a strategy that changes how a tensor is gathered wraps it, and calls them `plain`."""
    return getattr(local, "plain", local)


def _cuts(placements: tuple[Placement, ...]) -> Iterator[tuple[int, int]]:
    """(mesh dimension, tensor dimension) of every cut, in the order in which the cuts were made.

    Plain cuts were made from left to right. A strided one was made by FSDP after tensor parallelism, to its right, had cut
    the same dimension.
    """
    late = []
    for axis, placement in enumerate(placements):
        if isinstance(placement, StridedShard):
            late.append((axis, placement.dim))
        elif isinstance(placement, Shard):
            yield axis, placement.dim
        elif not isinstance(placement, Replicate):
            raise AssertionError(f"unknown placement {placement} of a tensor")
    yield from reversed(late)
