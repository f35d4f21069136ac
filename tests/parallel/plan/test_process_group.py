"""Groups that a layout opens: their limit is that of the world, and those of gloo have one thread each (docs/adr/0036)."""

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from forge_core.layout import Layout
from forge_parallel.launch import process_group
from forge_parallel.launch.environment import read_launcher
from forge_parallel.launch.process_group import destroy_process_groups, init_process_groups, limit
from forge_parallel.launch.watch import is_broken_connection
from forge_parallel.placement.topology import Topology
from forge_parallel.torch_private import fake_store, gloo_threads, limit_of, one_gloo_thread
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


@pytest.mark.parametrize("layout", fast(*(layout for layout in OF if layout != "dp4ep4"), of=OF))
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


@pytest.mark.parametrize(("layout", "axis"), fast(("dp2ep2", "ep"), of=MESHES))
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


PROGRAM = Path(__file__).with_name("gloo_heap.py")


def _ends(program: str, rounds: int) -> tuple[int, str]:
    """Exit code, and what it printed."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=os.environ | {"ROUNDS": str(rounds)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


def test_with_one_thread_the_heap_stays_whole() -> None:
    """The program below, unchanged, with its group opened as Forge opens groups; the other one seldom gets as far."""
    inside = "from forge_parallel.torch_private import one_gloo_thread\nimport runpy\nwith one_gloo_thread():\n"
    code, told = _ends(f"{inside}    runpy.run_path({str(PROGRAM)!r})", rounds=5_000)
    assert (code, told.strip()) == (0, "alive")


@pytest.mark.slow
def test_with_two_threads_torch_breaks_the_heap() -> None:
    """Once this fails, torch has mended it: `one_gloo_thread` and docs/adr/0036 can go."""
    for _ in range(10):
        code, told = _ends(f"import runpy\nrunpy.run_path({str(PROGRAM)!r})", rounds=20_000)
        if code in (-6, -11):  # SIGABRT of glibc, or SIGSEGV
            return
        assert code == 0 and told.strip() == "alive", told
    pytest.fail("ten programs of 160,000 gathers with two threads lived")


def _of_every_group(layout: str) -> list[int]:
    """Threads of all groups that a rank is in after everything was opened."""
    at, device = Layout.parse(layout), init_process_groups(read_launcher(os.environ), timeout=60)
    topology = Topology.of(at, device)
    topology.open_for_experts()
    topology.nodes("tp" if at.tp > 1 else "dp_shard", 1)
    found = [gloo_threads(group) for group in dist.distributed_c10d._world.pg_map]
    destroy_process_groups()
    return found


@pytest.mark.parametrize(("layout", "least"), [("tp4", 2), ("dp2tp2", 3), ("pp2dp2ep2", 4)])
def test_every_group_of_a_run_has_one(world: World, layout: str, least: int) -> None:
    for found in world.run(_of_every_group, 4, layout, group=False):
        assert set(found) == {1} and len(found) >= least


def _in_a_group_of_its_program() -> tuple[int, int, bool, float]:
    """Threads of a group that the program opened by itself, and of what a layout makes of it."""
    rank, size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    store = dist.TCPStore("127.0.0.1", port, size, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=50))
    group = Topology.of(Layout.parse("tp2"), torch.device("cpu")).group("tp")
    limit = limit_of(group, torch.device("cpu"))
    assert limit is not None
    found = gloo_threads(dist.distributed_c10d._get_default_group()), gloo_threads(group), group == dist.group.WORLD
    dist.destroy_process_group()
    return *found, limit.total_seconds()


def test_a_dimension_of_all_ranks_does_not_take_a_group_with_two(world: World) -> None:
    assert world.run(_in_a_group_of_its_program, 2, group=False) == [(2, 1, False, 50.0)] * 2


def _in_forges() -> bool:
    init_process_groups(read_launcher(os.environ), timeout=50)
    same = Topology.of(Layout.parse("tp2"), torch.device("cpu")).group("tp") == dist.group.WORLD
    destroy_process_groups()
    return same


def test_and_takes_one_that_forge_opened(world: World) -> None:
    assert world.run(_in_forges, 2, group=False) == [True, True]


def test_a_world_of_one_has_one() -> None:
    process_group.alone(torch.device("cpu"))
    try:
        assert gloo_threads(dist.distributed_c10d._get_default_group()) == 1
    finally:
        destroy_process_groups()


@pytest.mark.parametrize(("names", "devices"), [("lo", 1), ("lo,lo", 2), ("", 1)])
def test_interfaces_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch, names: str, devices: int) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", names)
    with one_gloo_thread():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=7))
    try:
        group = dist.distributed_c10d._get_default_group()
        options = group._get_backend(torch.device("cpu")).options
        assert len(options._devices) == devices and gloo_threads(group) == 1
        assert limit_of(group, torch.device("cpu")) == timedelta(seconds=7)
    finally:
        destroy_process_groups()


def test_afterwards_torch_is_as_it_was() -> None:
    before = dist.distributed_c10d.ProcessGroupGloo
    with pytest.raises(RuntimeError, match="inside"), one_gloo_thread():
        assert dist.distributed_c10d.ProcessGroupGloo is not before
        raise RuntimeError("inside")
    assert dist.distributed_c10d.ProcessGroupGloo is before
