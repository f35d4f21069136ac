"""The place of this rank in a layout: its coordinates, its device, and the process groups of all axes.

Groups get the timeout of the world's group and are connected when they are created. By default, torch would use a timeout of ten
or thirty minutes, and NCCL would connect in the first collective, somewhere in the first step; docs/adr/0025 explains why
`device_id` is not used. gloo groups get one thread, because torch's default of two corrupts the heap (docs/adr/0036).
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
    """Collective: opens a mesh of all ranks with named dimensions. Dimensions in `unused` are not connected, to save memory.

    Raises:
        LayoutError: see `connect`.
    """
    limit = _limit(device)
    # A dimension of all ranks would use the world's group, which a program may have opened with torch's default of two threads.
    anew = device.type == "cpu" and gloo_threads(world()) > 1
    apart: dict[int | str, Any] = {name: "gloo" for name, size in sizes.items() if anew and size == world().size()}
    with one_gloo_thread():
        mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes), backend_override=apart)
    for name in sizes:
        group = mesh.get_group(name)
        if group == world():  # it has its timeout and is connected
            continue
        if limit is not None:
            set_timeouts(limit, [group])
        if name not in unused:
            connect(group, name, device)
    return mesh


def open_group(parts: Iterable[tuple[int, ...]], name: str, device: torch.device) -> dist.ProcessGroup:
    """Collective over all ranks: opens groups for `parts`, which together contain every rank once; returns this rank's group.

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
    """Collective: connects the ranks of an NCCL group. Groups of other backends are connected already.

    Raises:
        LayoutError: NCCL cannot connect; names the group and its ranks.
        RuntimeError: a connection broke, for example because a rank ended or is late; a note names the group.
    """
    if group.size() == 1 or COLLECTIVES.get(device.type, "no") not in dist.get_backend_config(group):
        return
    ones = torch.ones((), dtype=torch.int64, device=device)
    try:
        dist.all_reduce(ones, group=group)
        total = int(ones)  # waits for the result
    except RuntimeError as cause:
        ranks = dist.get_process_group_ranks(group)
        which = f"the group of {name}, ranks {', '.join(map(str, ranks))}"
        if is_broken_connection(cause):
            cause.add_note(f"the collective was to connect {which}")
            raise
        raise LayoutError(
            f"{which}, could not connect: {cause}; NCCL_DEBUG=INFO shows what NCCL tries, NCCL_SOCKET_IFNAME names its interface"
        ) from cause
    if total != group.size():
        raise LayoutError(f"the group of {name}: {group.size()} ones sum to {total}; run `forge-train doctor` on its hosts")


def world() -> dist.ProcessGroup:
    """Returns the group of all ranks, which must be open."""
    everyone = dist.group.WORLD
    assert everyone is not None
    return everyone


def _limit(device: torch.device) -> timedelta | None:
    """Returns the timeout of the world's group; None if its backend has none, such as that of a dry run."""
    return limit_of(world(), device)


SHARD_AND_CP = "dp_shard+cp"
"""Name of the mesh dimension that combines dp_shard and cp."""


@dataclass(frozen=True)
class Topology:
    """One rank's view of a layout. Collective: create it on all ranks at the same point, since meshes open process groups.

    A world of one rank has no process group and no mesh.
    """

    layout: Layout
    device: torch.device
    rank: int = 0

    @classmethod
    def of(cls, layout: Layout, device: torch.device) -> "Topology":
        """Collective: returns the topology of the running process group, and connects the group if needed.

        Raises:
            LayoutError: the layout's number of ranks differs from the world size, or ranks cannot connect.
        """
        size = dist.get_world_size() if dist.is_initialized() else 1
        if layout.world != size:
            raise LayoutError(
                f"layout {layout} has {layout.world} ranks, but {size} processes are running; start {layout.world} processes"
            )
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
        """Index of the share of the global batch that this rank reads."""
        return self.layout.data_rank(self.rank)

    @property
    def data_size(self) -> int:
        """Number of shares into which the global batch is split."""
        return self.layout.data

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's coordinate on every axis of the dense and the sparse view."""
        return self.layout.coordinates(self.rank)

    @property
    def dense(self) -> DeviceMesh:
        """Mesh of dense parameters: (pp, dp_replicate, dp_shard, tp) without axes of size 1, except dp_shard, since FSDP2 shards
        over the last dimension: replication without sharding is (dp_replicate, dp_shard = 1). Ranks that split sequences also
        shard parameters: with cp, the dimension is `dp_shard+cp` instead of dp_shard."""
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
        """Mesh of the shard transform: dp_shard (with cp), after dp_replicate if that is larger than 1."""
        shard = SHARD_AND_CP if self.layout.cp > 1 else "dp_shard"
        return self.dense["dp_replicate", shard] if self.layout.dp_replicate > 1 else self.dense[shard]

    @property
    def sparse(self) -> DeviceMesh:
        """Mesh of experts over the same ranks: (pp, dp_replicate, efsdp, ep, etp) without axes of size 1, except efsdp."""
        return self._sparse

    @cached_property
    def _sparse(self) -> DeviceMesh:
        kept = {name: size for name in SPARSE if (size := self.layout.size(name)) > 1 or name == "efsdp"}
        return open_mesh(kept, self.device, unused=("pp",))  # stages use the pp group of the dense mesh

    @property
    def experts_mesh(self) -> DeviceMesh:
        """Mesh of the shard transform for experts: efsdp, after dp_replicate if that is larger than 1."""
        return self.sparse["dp_replicate", "efsdp"] if self.layout.dp_replicate > 1 else self.sparse["efsdp"]

    def open_for_experts(self) -> None:
        """Collective: opens the mesh of experts and the groups of pipeline stages. All ranks must call it, including those whose
        stages have no experts, because they would never open the groups later."""
        if self.size > 1:
            _ = self.sparse
            if self.layout.pp > 1:
                _ = self._stage_group

    def group(self, axis: str) -> dist.ProcessGroup:
        """Returns the group of ranks that differ from this one only on `axis` (larger than 1), in the order of coordinates."""
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
        """Group of all ranks. A mesh would use the world's group, in which tokens would wait for gathered parameters."""
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
        """Collective: returns the group of ranks with the same pipeline stages as this one, in rank order; without a pipeline the
        world's group. For several ranks only."""
        return world() if self.layout.pp == 1 else self._stage_group

    def across(self, axes: tuple[str, ...]) -> dist.ProcessGroup:
        """Collective: returns the group of ranks that differ from this one only on dense `axes`, in rank order. For several ranks
        only."""
        if axes not in self._across:
            self._across[axes] = open_group(self.layout.groups(axes), "+".join(axes), self.device)
        return self._across[axes]

    @cached_property
    def _across(self) -> dict[tuple[str, ...], dist.ProcessGroup]:
        return {}

    def nodes(self, axis: str, size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Collective: splits the ranks of `axis` into nodes of `size` neighboring ranks. Returns the group of this rank's node,
        and the group of its peers in all nodes."""
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
        """Collective: sums `tensor` in place over the ranks with the same pipeline stages; without a pipeline over all ranks."""
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
