"""Interfaces to the position of a rank in the layout, and to the part of the model that a strategy changes."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from forge_core.layout import Layout
from forge_core.specs import Specs

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class Topology(Protocol):
    """One rank's view of a layout (`forge_parallel.placement.topology.Topology`). A world of one has no groups or meshes."""

    @property
    def layout(self) -> Layout: ...
    @property
    def device(self) -> "torch.device": ...
    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int:
        """Number of ranks in the world."""
        ...

    @property
    def data_rank(self) -> int:
        """Number of the share of the global batch that this rank reads."""
        ...

    @property
    def data_size(self) -> int:
        """Number of shares of the global batch."""
        ...

    @property
    def coordinates(self) -> Mapping[str, int]:
        """This rank's coordinate on every axis of both views."""
        ...

    @property
    def dense(self) -> "DeviceMesh":
        """Mesh of dense parameters."""
        ...

    @property
    def sparse(self) -> "DeviceMesh":
        """Mesh of experts, over the same ranks."""
        ...

    @property
    def data_mesh(self) -> "DeviceMesh":
        """Mesh over which dense parameters are sharded, with the replica axis first, if any."""
        ...

    @property
    def experts_mesh(self) -> "DeviceMesh":
        """The same for parameters of experts."""
        ...

    def group(self, axis: str) -> "ProcessGroup":
        """Returns the group of ranks that differ from this one only on `axis`, in order of coordinates. The size of `axis` must
        be larger than 1."""
        ...

    def stage_group(self) -> "ProcessGroup":
        """Collective: returns the group of ranks that together hold this rank's pipeline stages, in rank order; without a
        pipeline, all ranks. The world must have several ranks."""
        ...

    def nodes(self, axis: str, size: int) -> "tuple[ProcessGroup, ProcessGroup]":
        """Collective: splits the ranks of `axis` into nodes of `size` neighbors; returns the group of this rank's node, and the
        group of its peers in all nodes."""
        ...

    def all_reduce(self, tensor: "Tensor") -> "Tensor":
        """Collective: sums `tensor` in place over the world; the identity in a world of one."""
        ...

    def from_first(self, tensor: "Tensor") -> "Tensor":
        """Collective: returns the tensor of rank 0 on every rank's device."""
        ...


class Context(Protocol):
    """One part of the model on one rank (`forge_parallel.model.parallel_model.Context`).

    Attributes:
        specs: specs of the part, with global names.
        topology: topology of this rank.
        compute: dtype of parameters and activations in forward and backward.
        state: dtype of the parameters that the optimizer updates.
        whole: specs of the whole model if the part is a pipeline stage, else None.
        average: whether gradients are averaged over data ranks instead of summed, for loops with a mean loss on each rank.
    """

    @property
    def specs(self) -> Specs: ...
    @property
    def topology(self) -> Topology: ...
    @property
    def compute(self) -> "torch.dtype": ...
    @property
    def state(self) -> "torch.dtype": ...
    @property
    def whole(self) -> Specs | None: ...
    @property
    def average(self) -> bool: ...
