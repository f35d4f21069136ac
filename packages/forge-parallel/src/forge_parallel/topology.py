"""The layout made real: this rank's coordinates, device and meshes."""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from forge_core.errors import LayoutError
from forge_core.layout import DENSE, Layout

SHARD_AND_CP = "dp_shard+cp"
"""Mesh dimension of all ranks of dp_shard and cp."""


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
        """Mesh on which dense parameters live: (pp, dp_replicate, dp_shard, tp) without axes of size 1, but for dp_shard:
        replication without sharding is (dp_replicate, dp_shard = 1), since FSDP2 shards over the last dimension that it is
        given. Ranks that split a sequence shard parameters, too: dp_shard is then `dp_shard+cp`."""
        sizes = {name: self.layout.size(name) for name in DENSE}
        if sizes.pop("cp") > 1:
            sizes = {SHARD_AND_CP if name == "dp_shard" else name: size for name, size in sizes.items()}
            sizes[SHARD_AND_CP] *= self.layout.cp
        kept = {name: size for name, size in sizes.items() if size > 1 or name in ("dp_shard", SHARD_AND_CP)}
        return init_device_mesh(self.device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))

    @property
    def data_mesh(self) -> DeviceMesh:
        """Mesh over which the shard transform works: dp_shard (with cp), after dp_replicate where there is one."""
        shard = SHARD_AND_CP if self.layout.cp > 1 else "dp_shard"
        return self.dense["dp_replicate", shard] if self.layout.dp_replicate > 1 else self.dense[shard]

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks that differ from this one on `axis` only, in the order of their coordinates. `axis` is larger than 1."""
        return self._cp_group if axis == "cp" else self.dense[axis].get_group()

    @cached_property
    def _cp_group(self) -> dist.ProcessGroup:
        mine, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in self.layout.groups(("cp",))])
        assert isinstance(mine, dist.ProcessGroup)
        return mine

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums `tensor` in place over the world; the identity in a world of one."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor
