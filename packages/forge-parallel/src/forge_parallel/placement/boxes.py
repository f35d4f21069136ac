"""The box of a global tensor that each rank holds, and which rank owns it.

Each element has one owner. Norms, checkpoints, digests and parameter counts take an element from its owner only.
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
    span = _span(tensor, at)
    if span.extent != tuple(local.shape):
        raise AssertionError(f"{tensor.placements} of {shape} should give {span.extent}, but torch holds {tuple(local.shape)}")
    return Box(shape, span.offset, local)


class Span(NamedTuple):
    """Where a box begins in the global tensor, and its size in every dimension."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]


def span_on(tensor: torch.Tensor, layout: Layout, rank: int) -> Span:
    """The box of another rank of the same pipeline stage, from the layout alone: nothing is exchanged."""
    if not isinstance(tensor, DTensor):
        return Span((0,) * tensor.dim(), tuple(tensor.shape))
    coordinates, names = layout.coordinates(rank), tensor.device_mesh.mesh_dim_names
    assert names is not None, "meshes of a topology have names"
    at = []
    for name in names:
        index = 0
        for axis in name.split("+"):  # a dimension of several axes is named by all of them
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


def owns(tensor: torch.Tensor, topology: Topology) -> bool:
    """Whether this rank owns its box of `tensor`. Pipeline parts hold different tensors, so `pp` never replicates."""
    at = topology.coordinates
    return all(at[axis] == 0 for axis in replicating_axes(tensor, topology))


def replicating_axes(tensor: torch.Tensor, topology: Topology) -> frozenset[str]:
    """Axes larger than 1 along which ranks hold the same box of `tensor`."""
    sharding, view = _sharding_axes(tensor)
    return frozenset(axis for axis in view if axis != "pp" and axis not in sharding and topology.layout.size(axis) > 1)


def _sharding_axes(tensor: torch.Tensor) -> tuple[frozenset[str], tuple[str, ...]]:
    """Axes over which `tensor` is cut, and the view that they belong to."""
    if not isinstance(tensor, DTensor):
        return frozenset(), DENSE
    names = tensor.device_mesh.mesh_dim_names or ()
    view = SPARSE if {"efsdp", "ep", "etp"} & set(names) else DENSE
    cut = (name for name, placement in zip(names, tensor.placements, strict=True) if not isinstance(placement, Replicate))
    return frozenset(axis for name in cut for axis in _expanded(name)), view


def _expanded(name: str) -> tuple[str, ...]:
    """A flattened mesh dimension is named by its axes, joined by `+`."""
    return tuple(name.split("+"))
