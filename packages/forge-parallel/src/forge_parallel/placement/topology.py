"""The place of this rank in a layout: its coordinates, its device, and the process groups of every axis.

Groups are opened with the limit of the world's group and connected at once. torch gives them another limit, of ten or thirty
minutes, and NCCL connects a group in its first collective, which would be somewhere in the first step; docs/adr/0025 says why
not by `device_id`. Groups of gloo have one thread: with the two that torch gives them, they corrupt the heap (docs/adr/0036).
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from forge_core.errors import LayoutError
from forge_core.layout import DENSE, SPARSE, Layout
from forge_parallel.accelerator import COLLECTIVES
from forge_parallel.launch.watch import is_broken_connection
from forge_parallel.torch_private import gloo_threads, limit_of, one_gloo_thread, set_timeouts


def open_mesh(sizes: Mapping[str, int], device: torch.device, unused: Collection[str] = ()) -> DeviceMesh:
    """Collective: a mesh of all ranks, its dimensions by name. Those that are `unused` are not connected: that takes memory.

    Raises:
        LayoutError: see `connect`.
    """
    limit = _limit(device)
    # A dimension of all ranks takes the world's group, which a program may have opened itself, with torch's two threads.
    anew = device.type == "cpu" and gloo_threads(world()) > 1
    apart: dict[int | str, Any] = {name: "gloo" for name, size in sizes.items() if anew and size == world().size()}
    with one_gloo_thread():
        mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes), backend_override=apart)
    for name in sizes:
        group = mesh.get_group(name)
        if group == world():  # of a dimension of all ranks; it has both
            continue
        if limit is not None:
            set_timeouts(limit, [group])
        if name not in unused:
            connect(group, name, device)
    return mesh


def open_group(parts: Iterable[tuple[int, ...]], name: str, device: torch.device) -> dist.ProcessGroup:
    """Collective: this rank's group, of `parts` that together have every rank once. All ranks enter.

    Raises:
        LayoutError: see `connect`.
    """
    ranks = [list(part) for part in parts]
    with one_gloo_thread():
        group, _ = dist.new_subgroups_by_enumeration(ranks, timeout=_limit(device), group_desc=name)
    assert isinstance(group, dist.ProcessGroup)
    connect(group, name.removeprefix("mesh_"), device)
    return group


def connect(group: dist.ProcessGroup, name: str, device: torch.device) -> None:
    """Collective: the ranks of a group of NCCL reach each other, or say which ones did not. Others are connected once open.

    Raises:
        LayoutError: NCCL cannot; names the group and its ranks.
        RuntimeError: a connection broke, as it does when a rank ends or is late; the group is noted.
    """
    if group.size() == 1 or COLLECTIVES.get(device.type, "no") not in dist.get_backend_config(group):
        return
    ones = torch.ones((), dtype=torch.int64, device=device)
    try:
        dist.all_reduce(ones, group=group)
        found = int(ones)  # waits for it
    except RuntimeError as cause:
        ranks = dist.get_process_group_ranks(group)
        which = f"the group of {name}, ranks {', '.join(map(str, ranks))}"
        if is_broken_connection(cause):
            cause.add_note(f"it was to connect {which}")
            raise
        raise LayoutError(
            f"{which}, could not connect: {cause}; NCCL_DEBUG=INFO shows what NCCL tries, NCCL_SOCKET_IFNAME names its interface"
        ) from cause
    if found != group.size():
        raise LayoutError(f"the group of {name}: {group.size()} ones are {found}; run `forge-train doctor` on its hosts")


def world() -> dist.ProcessGroup:
    """The group of all ranks, which is open."""
    everyone = dist.group.WORLD
    assert everyone is not None
    return everyone


def _limit(device: torch.device) -> timedelta | None:
    """Of the world's group. None where its backend keeps none, such as that of a dry run."""
    return limit_of(world(), device)


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
        """Collective: the topology of the running process group, which is connected here if it was not before.

        Raises:
            LayoutError: the layout does not have as many ranks as there are processes, or they do not reach each other.
        """
        size = dist.get_world_size() if dist.is_initialized() else 1
        if layout.world != size:
            raise LayoutError(f"layout {layout} has {layout.world} ranks, but {size} processes are running")
        if size == 1:
            return cls(layout, device)
        connect(world(), "the world", device)
        return cls(layout, device, dist.get_rank())

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

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's coordinate on every axis of both views."""
        return self.layout.coordinates(self.rank)

    @property
    def dense(self) -> DeviceMesh:
        """Mesh on which dense parameters live: (pp, dp_replicate, dp_shard, tp) without axes of size 1, but for dp_shard:
        replication without sharding is (dp_replicate, dp_shard = 1), since FSDP2 shards over the last dimension that it is
        given. Ranks that split a sequence shard parameters, too: dp_shard is then `dp_shard+cp`."""
        return self._dense

    @cached_property
    def _dense(self) -> DeviceMesh:
        sizes = {name: self.layout.size(name) for name in DENSE}
        if sizes.pop("cp") > 1:
            sizes = {SHARD_AND_CP if name == "dp_shard" else name: size for name, size in sizes.items()}
            sizes[SHARD_AND_CP] *= self.layout.cp
        kept = {name: size for name, size in sizes.items() if size > 1 or name in ("dp_shard", SHARD_AND_CP)}
        return open_mesh(kept, self.device)

    @property
    def data_mesh(self) -> DeviceMesh:
        """Mesh over which the shard transform works: dp_shard (with cp), after dp_replicate where there is one."""
        shard = SHARD_AND_CP if self.layout.cp > 1 else "dp_shard"
        return self.dense["dp_replicate", shard] if self.layout.dp_replicate > 1 else self.dense[shard]

    @property
    def sparse(self) -> DeviceMesh:
        """Mesh of the same ranks on which experts live: (pp, dp_replicate, efsdp, ep, etp) without axes of size 1, but for
        efsdp."""
        return self._sparse

    @cached_property
    def _sparse(self) -> DeviceMesh:
        kept = {name: size for name in SPARSE if (size := self.layout.size(name)) > 1 or name == "efsdp"}
        return open_mesh(kept, self.device, unused=("pp",))  # stages talk over the group of the dense mesh

    @property
    def experts_mesh(self) -> DeviceMesh:
        """Mesh over which the shard transform works on experts: efsdp, after dp_replicate where there is one."""
        return self.sparse["dp_replicate", "efsdp"] if self.layout.dp_replicate > 1 else self.sparse["efsdp"]

    def open_for_experts(self) -> None:
        """Collective: opens the mesh of experts, and the group of this rank's pipeline stages. All ranks enter, also those whose
        stages have no expert, so no rank may open them later."""
        if self.size > 1:
            _ = self.sparse
            if self.layout.pp > 1:
                _ = self._stage_group

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks that differ from this one on `axis` only, in the order of their coordinates. `axis` is larger than 1."""
        if axis == "cp":
            return self._cp_group
        if axis == "dp_shard" and self.layout.cp > 1:  # the mesh has both as one dimension
            return self._shard_group
        if axis in ("ep", "etp") and self.layout.size(axis) == self.size:
            return self._experts_group
        return (self.sparse if axis in ("efsdp", "ep", "etp") else self.dense)[axis].get_group()

    @cached_property
    def _cp_group(self) -> dist.ProcessGroup:
        return open_group(self.layout.groups(("cp",)), "cp", self.device)

    @cached_property
    def _experts_group(self) -> dist.ProcessGroup:
        """Of all ranks. A mesh would take the world's, in which tokens would wait for gathered parameters."""
        name = "mesh_ep" if self.layout.ep > 1 else "mesh_etp"
        return open_group([tuple(range(self.size))], name, self.device)

    @cached_property
    def _shard_group(self) -> dist.ProcessGroup:
        return open_group(self.layout.groups(("dp_shard",)), "dp_shard", self.device)

    @cached_property
    def _stage_group(self) -> dist.ProcessGroup:
        within = [axis for axis in DENSE if axis != "pp"]
        return open_group(self.layout.groups(within), "stages", self.device)

    def stage_group(self) -> dist.ProcessGroup:
        """Collective: the ranks that together hold the pipeline stages of this one, in rank order; all ranks without a pipeline.
        There are several."""
        return world() if self.layout.pp == 1 else self._stage_group

    def across(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        """Collective: the ranks that differ from this one on dense `axes` only, in rank order. There are several ranks."""
        if axes not in self._across:
            self._across[axes] = open_group(self.layout.groups(axes), "+".join(axes), self.device)
        return self._across[axes]

    @cached_property
    def _across(self) -> dict[tuple[str, ...], dist.ProcessGroup]:
        return {}

    def nodes(self, axis: str, size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Collective: of the ranks of `axis`, `size` neighbors of which are in one node, this one's node, and its peers in all
        nodes."""
        if (axis, size) not in self._nodes:
            groups = list(self.layout.groups((axis,)))
            inside = [ranks[start : start + size] for ranks in groups for start in range(0, len(ranks), size)]
            across = [ranks[start::size] for ranks in groups for start in range(size)]
            self._nodes[axis, size] = (
                open_group(inside, f"{axis}.inside", self.device),
                open_group(across, f"{axis}.across", self.device),
            )
        return self._nodes[axis, size]

    @cached_property
    def _nodes(self) -> dict[tuple[str, int], tuple[dist.ProcessGroup, dist.ProcessGroup]]:
        return {}

    def stage_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Collective: sums `tensor` in place over the ranks of the same pipeline stages; of all without a pipeline."""
        if self.layout.pp == 1:
            return self.all_reduce(tensor)
        dist.all_reduce(tensor, group=self._stage_group)
        return tensor

    def from_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Collective: the tensor of rank 0, on every rank's device."""
        there = tensor.to(self.device)
        if self.size > 1:
            dist.broadcast(there, 0)
        return there

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Collective: sums `tensor` in place over the world; the identity in a world of one."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor
