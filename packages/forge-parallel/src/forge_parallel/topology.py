"""The layout made real: this rank's coordinates, device and meshes."""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from forge_core.errors import LayoutError
from forge_core.layout import DENSE, Layout


@dataclass(frozen=True)
class Topology:
    """One rank's view of a layout. Made by every rank at the same point, since meshes open process groups.

    A world of one has no process group and no mesh.
    """

    layout: Layout
    device: torch.device
    rank: int = 0

    @classmethod
    def of(cls, layout: Layout, device: torch.device) -> "Topology":
        """The topology of the running process group.

        Raises:
            LayoutError: the layout does not have as many ranks as there are processes.
        """
        size = dist.get_world_size() if dist.is_initialized() else 1
        if layout.world != size:
            raise LayoutError(f"layout {layout} has {layout.world} ranks, but {size} processes are running")
        return cls(layout, device, dist.get_rank() if size > 1 else 0)

    @property
    def size(self) -> int:
        """Number of ranks in the world."""
        return self.layout.world

    @property
    def data_rank(self) -> int:
        """Which share of the global batch this rank reads."""
        return self.layout.data_rank(self.rank)

    @property
    def data_size(self) -> int:
        """Into how many shares the global batch is cut."""
        return self.layout.data

    @cached_property
    def coordinates(self) -> dict[str, int]:
        """This rank's coordinate on every axis of both views."""
        return self.layout.coordinates(self.rank)

    @cached_property
    def dense(self) -> DeviceMesh:
        """Mesh of the dense view. Axes of size 1 are left out, but for dp_shard: replication without sharding is the
        mesh (dp_replicate, dp_shard = 1), since FSDP2 shards over the last dimension of whatever it is given."""
        axes = [axis for axis in DENSE if self.layout.size(axis) > 1 or axis == "dp_shard"]
        return init_device_mesh(self.device.type, tuple(map(self.layout.size, axes)), mesh_dim_names=tuple(axes))

    @cached_property
    def data_mesh(self) -> DeviceMesh:
        """Mesh over which the shard transform works: (dp_shard,) or (dp_replicate, dp_shard)."""
        return self.dense["dp_replicate", "dp_shard"] if self.layout.dp_replicate > 1 else self.dense["dp_shard"]

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums `tensor` in place over the world; the identity in a world of one."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor
