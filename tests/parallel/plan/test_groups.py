"""Groups that a layout opens: their limit is that of the world from the beginning."""

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from forge_core.layout import Layout
from forge_parallel.launch.environment import read_launcher
from forge_parallel.launch.process_group import destroy_process_groups, init_process_groups, limit
from forge_parallel.launch.watch import is_broken_connection
from forge_parallel.placement.topology import Topology
from forge_parallel.torch_private import fake_store, limit_of
from harness.pool import World
from harness.siblings import fast

OF = {
    "dp2tp2": ("dp_shard", "tp"),
    "hsdp2x2": ("dp_replicate", "dp_shard"),
    "dp2cp2": ("dp_shard", "cp"),
    "dp4ep2": ("efsdp", "ep"),
    "dp4ep4": ("ep",),
    "pp2dp2ep2": ("pp", "ep"),
}
"""Layouts of four ranks, and axes whose groups they open."""


def _limits(layout: str) -> dict[str, float | None]:
    """Of the world's group and of all that the layout opens, in seconds."""
    at, device = Layout.parse(layout), init_process_groups(read_launcher(os.environ), timeout=77)
    topology = Topology.of(at, device)
    topology.open_for_experts()
    groups = {axis: topology.group(axis) for axis in OF[layout]}
    groups["efsdp of the mesh"] = topology.sparse["efsdp"].get_group()
    groups["inside"], groups["across"] = topology.nodes(OF[layout][0], 1)
    if at.pp > 1:
        groups["stages"] = topology._stage_group
    found = {name: limit_of(group, device) for name, group in groups.items()}
    limit(44, device)
    later, _ = topology.nodes(OF[layout][-1], 2)
    found["opened after a new limit"] = limit_of(later, device)
    destroy_process_groups()
    return {name: one and one.total_seconds() for name, one in found.items()}


@pytest.mark.parametrize("layout", OF)
def test_every_group_of_a_layout_has_the_limit_of_the_world(world: World, layout: str) -> None:
    for found in world.run(_limits, 4, layout, group=False):
        assert found.pop("opened after a new limit") == 44
        assert len(found) >= 4 and set(found.values()) == {77.0}, found


def _late(layout: str, axis: str, told: Path) -> str:
    """What the first rank says of another one of its group, which does not come before the first has given up."""
    at, where = Layout.parse(layout), read_launcher(os.environ)
    device = init_process_groups(where, timeout=3)
    group = Topology.of(at, device).group(axis)
    said = ""
    if where.rank == 0:
        try:
            dist.all_reduce(torch.zeros(1), group=group)
        except RuntimeError as error:
            assert is_broken_connection(error)
            said = str(error)
        told.touch()
    else:
        for _ in range(400):
            if told.exists():
                break
            time.sleep(0.1)
        assert told.exists(), "the first rank waits for longer than its limit"
    destroy_process_groups()
    return said


MESHES = [("cp2", "cp"), ("dp2ep2", "ep"), ("dp2tp2", "tp"), ("dp2tp2", "dp_shard")]


@pytest.mark.parametrize(("layout", "axis"), fast(("cp2", "cp"), ("dp2ep2", "ep"), of=MESHES))
def test_who_waits_in_a_group_of_a_mesh_gives_up_in_time(world: World, tmp_path: Path, layout: str, axis: str) -> None:
    first, *_ = world.run(_late, Layout.parse(layout).world, layout, axis, tmp_path / "told", group=False, fresh=True)
    assert "imed out" in first


def _without_a_limit() -> timedelta | None:
    dist.init_process_group("fake", store=fake_store(), rank=0, world_size=4)
    try:
        topology = Topology.of(Layout.parse("dp2tp2"), torch.device("cpu"))
        return limit_of(topology.group("tp"), torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def test_a_backend_without_a_limit_is_given_none(world: World) -> None:
    assert world.run(_without_a_limit, 1, group=False, fresh=True) == [None]
