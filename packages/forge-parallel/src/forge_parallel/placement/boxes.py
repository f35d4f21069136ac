"""The box of a global tensor that each rank holds, and the rank that owns it.

Each element has one owner. Norms, checkpoints, digests and parameter counts use an element only on its owner.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement, Shard

from forge_core.layout import DENSE, SPARSE, Layout
from forge_parallel.placement.shares import chunk
from forge_parallel.placement.topology import Topology
from forge_parallel.torch_private import StridedShard


@dataclass(frozen=True)
class Box:
    """The part of a global tensor of `shape` that starts at `offset`; `local` holds its values."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    local: torch.Tensor

    def within(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns the view of `whole`, a tensor of the global shape, at the place of this box."""
        extents = zip(self.offset, self.local.shape, strict=True)
        return whole[tuple(slice(start, start + size) for start, size in extents)]


def local_box(tensor: torch.Tensor) -> Box:
    """Returns this rank's box; for a plain tensor the whole tensor. `local` shares memory with `tensor`."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Box(shape, (0,) * tensor.dim(), tensor.detach())
    mesh, local = tensor.device_mesh, local_part(tensor)
    at = mesh.get_coordinate()
    assert at is not None, "this rank is not in the tensor's mesh"
    span = _span(tensor, at)
    if span.extent != tuple(local.shape):
        raise AssertionError(f"{tensor.placements} of {shape} should give {span.extent}, but torch holds {tuple(local.shape)}")
    return Box(shape, span.offset, local)


def local_part(tensor: DTensor) -> torch.Tensor:
    """Returns the elements of a DTensor on this rank. They share memory with it."""
    return plain(tensor.to_local()).detach()


class Span(NamedTuple):
    """The offset of a box in the global tensor, and its extent in every dimension."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]


def span_on(tensor: torch.Tensor, layout: Layout, rank: int) -> Span:
    """Returns the box of another rank of the same pipeline stage, from the layout alone, without communication."""
    if not isinstance(tensor, DTensor):
        return Span((0,) * tensor.dim(), tuple(tensor.shape))
    coordinates, names = layout.coordinates(rank), tensor.device_mesh.mesh_dim_names
    assert names is not None, "meshes of a topology have names"
    at = []
    for name in names:
        index = 0
        for axis in name.split("+"):  # the name of a flattened dimension lists its axes
            index = index * layout.size(axis) + coordinates[axis]
        at.append(index)
    return _span(tensor, at)


def _span(tensor: DTensor, at: Sequence[int]) -> Span:
    offset, extent = [0] * tensor.dim(), list(tensor.shape)
    for axis, dim in _cuts(tensor.placements):
        start, size = chunk(extent[dim], tensor.device_mesh.size(axis), at[axis])
        offset[dim], extent[dim] = offset[dim] + start, size
    return Span(tuple(offset), tuple(extent))


def plain(local: torch.Tensor) -> torch.Tensor:
    """Returns the values that a rank holds. Transforms that wrap a shard expose its values as the attribute `plain`."""
    return getattr(local, "plain", local)


def _cuts(placements: tuple[Placement, ...]) -> Iterator[tuple[int, int]]:
    """Yields (mesh dimension, tensor dimension) of every shard, in the order in which the tensor was sharded.

    Plain shards are ordered from left to right. A strided shard is from FSDP, which sharded the dimension after tensor
    parallelism to its right had done so.
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


def owns(tensor: torch.Tensor, topology: Topology) -> bool:
    """Whether this rank owns its box of `tensor`. Pipeline stages hold different tensors, so `pp` never replicates."""
    at = topology.coordinates
    return all(at[axis] == 0 for axis in replicating_axes(tensor, topology))


def replicating_axes(tensor: torch.Tensor, topology: Topology) -> frozenset[str]:
    """Axes larger than 1 along which ranks hold the same box of `tensor`."""
    sharding, view = _sharding_axes(tensor)
    return frozenset(axis for axis in view if axis != "pp" and axis not in sharding and topology.layout.size(axis) > 1)


def _sharding_axes(tensor: torch.Tensor) -> tuple[frozenset[str], tuple[str, ...]]:
    """Returns the axes over which `tensor` is sharded, and the view (dense or sparse) to which they belong."""
    if not isinstance(tensor, DTensor):
        return frozenset(), DENSE
    names = tensor.device_mesh.mesh_dim_names or ()
    view = SPARSE if {"efsdp", "ep", "etp"} & set(names) else DENSE
    cut = (name for name, placement in zip(names, tensor.placements, strict=True) if not isinstance(placement, Replicate))
    return frozenset(axis for name in cut for axis in _expanded(name)), view


def _expanded(name: str) -> tuple[str, ...]:
    """Returns the axes of a mesh dimension; the name of a flattened one joins its axes with `+`."""
    return tuple(name.split("+"))
