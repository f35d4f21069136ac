"""Each element of each global tensor has exactly one owning rank.

A rank owns its local box when its coordinate is 0 on every axis that does not shard the tensor. The gradient norm,
checkpoint writes, digests and parameter counts sum over owners, so that nothing is counted twice in any layout.
"""

import torch
from torch.distributed.tensor import DTensor, Replicate

from forge_core.layout import DENSE, SPARSE
from forge_parallel.placement.topology import Topology


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
