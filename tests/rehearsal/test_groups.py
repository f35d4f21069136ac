"""Groups of NCCL: all have the limit of the world's, and are connected when they are opened; what cannot connect is named."""

import os
import threading
from datetime import timedelta
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch
import torch.distributed as dist

from forge_core.errors import LayoutError
from forge_core.layout import Layout
from forge_parallel.launch.environment import read_launcher
from forge_parallel.launch.process_group import destroy_process_groups, init_process_groups
from forge_parallel.launch.watch import Watch, is_broken_connection
from forge_parallel.placement import topology
from forge_parallel.placement.topology import Topology, connect, world
from forge_parallel.torch_private import limit_of, set_timeouts
from harness.pool import World
from rehearsal.ranks import own_device

pytestmark = pytest.mark.rehearsal


def _connected(layout: str) -> tuple[list[tuple[str, int]], set[float]]:
    """Description and size of the groups in the order of their first sums; the limits of all groups, in seconds."""
    seen, sums = [], dist.all_reduce

    def noted(tensor: torch.Tensor, *args: Any, group: Any = None, **kwargs: Any) -> Any:
        seen.append((group.group_desc, group.size()))
        return sums(tensor, *args, group=group, **kwargs)

    at = Layout.parse(layout)
    with own_device() as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", noted)
        topology = Topology.of(at, device)
        opened = [world(), *topology.dense.get_all_groups()]
        if at.ep > 1:
            topology.open_for_experts()
            opened += [topology.group("ep"), *topology.sparse.get_all_groups()]
        if at.cp > 1:
            opened.append(topology.group("cp"))
        kinds = (device, torch.device("cpu"))
        found = {limit.total_seconds() for group in opened for kind in kinds if (limit := limit_of(group, kind)) is not None}
    return seen, found


WORLD = ("default_pg", 4)
OPENED = {
    "dp4": [WORLD],
    "dp2tp2": [WORLD, ("mesh_dp_shard", 2), ("mesh_tp", 2)],
    "hsdp2x2": [WORLD, ("mesh_dp_replicate", 2), ("mesh_dp_shard", 2)],
    "hsdp4x1": [WORLD],
    "dp2cp2": [WORLD, ("cp", 2)],
    "dp4ep4": [WORLD, ("mesh_ep", 4)],
    "pp2dp2ep2": [WORLD, ("mesh_pp", 2), ("mesh_dp_shard", 2), ("mesh_ep", 2), ("stages", 2)],
}
"""What each layout connects: once each, but for the pipeline of the experts' mesh, which carries nothing."""


@pytest.mark.parametrize("layout", OPENED)
def test_groups_are_connected_when_they_are_opened(devices: World, layout: str) -> None:
    for seen, limits in devices.run(_connected, 4, layout, group=False):
        assert sorted(seen) == sorted(OPENED[layout])
        assert seen[0] == WORLD
        assert limits == {180.0}  # a minute more than the watch has


def _apart(told: Path) -> tuple[str, list[str]]:
    """What the first rank is told when the second does not come to connect."""
    where = read_launcher(os.environ)
    device = init_process_groups(where, timeout=3)
    group = Topology.of(Layout.parse("cp2"), device).group("cp")
    set_timeouts(timedelta(seconds=2), [group])  # without the minute
    if where.rank == 1:
        while not told.exists():
            sleep(0.1)
        destroy_process_groups()
        return "", []
    try:
        connect(group, "cp", device)
    except RuntimeError as error:
        assert is_broken_connection(error)
        return str(error), error.__notes__
    finally:
        told.touch()
        destroy_process_groups()
    return "connected", []


def test_who_does_not_connect_is_named_with_the_group(devices: World, tmp_path: Path) -> None:
    (said, notes), _ = devices.run(_apart, 2, tmp_path / "told", group=False, fresh=True)
    assert "imed out" in said
    assert notes == ["the collective was to connect the group of cp, ranks 0, 1"]


def _refused(how: str) -> str:
    def broken(*_: Any, **__: Any) -> None:
        raise dist.DistBackendError("NCCL error: unhandled system error")

    with own_device() as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", broken if how == "broken" else lambda *_, **__: None)
        try:
            Topology.of(Layout.parse("dp2"), device)
        except LayoutError as refusal:
            return str(refusal)
    return "connected"


def test_what_nccl_refuses_is_refused_at_the_start(devices: World) -> None:
    for said in devices.run(_refused, 2, "broken", group=False):
        assert said.startswith("the group of the world, ranks 0, 1, could not connect: NCCL error: unhandled system error")
        assert "NCCL_DEBUG=INFO" in said and "NCCL_SOCKET_IFNAME" in said


def test_a_sum_that_is_wrong_is_refused_at_the_start(devices: World) -> None:
    for said in devices.run(_refused, 2, "wrong", group=False):
        assert said.startswith("the group of the world: 2 ones sum to 1; ")


def _on_a_cpu() -> int:
    calls = []
    with own_device(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda *_, **__: calls.append(1))
        Topology.of(Layout.parse("dp2"), torch.device("cpu")).group("dp_shard")
    return len(calls)


def test_groups_of_a_cpu_are_connected_already(devices: World) -> None:
    assert devices.run(_on_a_cpu, 2, group=False) == [0, 0]


def _looked_at() -> tuple[bool, str]:
    """What the watch sees of a rank that waits for the first sum, in a call that has no frame of Python."""
    watch, seen = Watch(), list[Any]()
    look = threading.Timer(0.2, lambda: seen.append(watch._sight()))
    with own_device() as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda *_, **__: look.start())
        patch.setattr(topology, "int", sleep, raising=False)
        with pytest.raises(LayoutError):
            connect(world(), "the world", device)
    look.join()
    return seen[0].waits, seen[0].where


def test_the_watch_knows_that_a_rank_which_connects_waits(devices: World) -> None:
    for waits, where in devices.run(_looked_at, 2, group=False):
        assert waits and where.startswith("topology.py:") and where.endswith("(connect)")


def _index() -> tuple[int | None, int]:
    """Of the device that a rank is given, and of the current one."""
    with own_device() as device:
        return device.index, torch.cuda.current_device()


def test_each_process_of_a_node_has_a_device_of_its_own(devices: World) -> None:
    assert devices.run(_index, 3, group=False) == [(0, 0), (1, 1), (2, 2)]
