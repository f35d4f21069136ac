"""What a strategy and a hook may ask about this rank's place in the layout, and a strategy about the part that it changes."""

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
    """One rank's view of a layout (`forge_parallel.placement.topology.Topology`). A world of one has no group and no mesh."""

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
        """Which share of the global batch this rank reads."""
        ...

    @property
    def data_size(self) -> int:
        """Into how many shares the global batch is cut."""
        ...

    @property
    def coordinates(self) -> Mapping[str, int]:
        """This rank's coordinate on every axis of both views."""
        ...

    @property
    def dense(self) -> "DeviceMesh":
        """Mesh on which dense parameters live."""
        ...

    @property
    def sparse(self) -> "DeviceMesh":
        """Mesh of the same ranks on which experts live."""
        ...

    @property
    def data_mesh(self) -> "DeviceMesh":
        """Mesh over which dense parameters are sharded, after the axis of their replicas where there is one."""
        ...

    @property
    def experts_mesh(self) -> "DeviceMesh":
        """The same for parameters of experts."""
        ...

    def group(self, axis: str) -> "ProcessGroup":
        """The ranks that differ from this one on `axis` only, in the order of their coordinates. `axis` is larger than 1."""
        ...

    def stage_group(self) -> "ProcessGroup":
        """Collective: the ranks that together hold the pipeline stages of this one, in rank order; all ranks without a pipeline.
        There are several."""
        ...

    def nodes(self, axis: str, size: int) -> "tuple[ProcessGroup, ProcessGroup]":
        """Collective: of the ranks of `axis`, `size` neighbors of which are in one node, this one's node, and its peers in all
        nodes."""
        ...

    def all_reduce(self, tensor: "Tensor") -> "Tensor":
        """Collective: sums `tensor` in place over the world; the identity in a world of one."""
        ...

    def from_first(self, tensor: "Tensor") -> "Tensor":
        """Collective: the tensor of rank 0, on every rank's device."""
        ...


class Context(Protocol):
    """One part of the model on one rank (`forge_parallel.model.parallel_model.Context`).

    Attributes:
        specs: of the part; its names are global.
        topology: this rank's place.
        compute: dtype of parameters and activations in forward and backward.
        state: dtype of what the optimizer updates.
        whole: of the whole model, of which the part may be a pipeline's stage; None where it is all of it.
        average: whether gradients are averaged over data ranks, not summed: for loops that take a mean on each rank.
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
