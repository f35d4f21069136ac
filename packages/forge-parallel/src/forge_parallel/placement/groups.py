"""Groups of ranks as a layout opens them: with the limit of the world's group, and connected before anything is computed.

torch gives what it opens another limit, ten or thirty minutes. NCCL connects a group in its first collective, which would be
somewhere in the first step. Why not by `device_id`, which connects groups as they are opened: docs/adr/0025.

Groups of gloo have one thread: with the two that torch gives them, they break the heap (docs/adr/0036).
"""

from collections.abc import Collection, Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from forge_core.errors import LayoutError
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
