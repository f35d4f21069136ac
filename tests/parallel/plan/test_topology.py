"""Coordinates, meshes and ownership."""

import logging
import os
import time

import pytest
import torch

from forge_core.errors import LayoutError
from forge_core.layout import Layout
from forge_parallel.launch.environment import read_launcher
from forge_parallel.launch.process_group import destroy_process_groups, init_process_groups, limit
from forge_parallel.launch.watch import PeerFailure
from forge_parallel.model.plan import Plan
from forge_parallel.model.realize import Blueprint, realize
from forge_parallel.placement.boxes import owns
from forge_parallel.placement.topology import Topology
from forge_parallel.transforms.shard import FullyShard
from harness.pool import World
from parallel.tiny import TiedTiny


def _owned(layout: str) -> dict[str, torch.Tensor]:
    """Per tensor: how many ranks own each element, counted over the world."""
    at = Layout.parse(layout)
    topology = Topology.of(at, torch.device("cpu"))
    model = realize(Blueprint.of(TiedTiny), Plan.of([FullyShard()], at), topology, 0)
    counts = {}
    for piece in model.pieces():
        count = torch.zeros(piece.shape)
        region = tuple(slice(start, start + size) for start, size in zip(piece.offset, piece.local.shape, strict=True))
        count[region] += piece.owned
        counts[piece.name] = topology.all_reduce(count)
    assert model.parameter_count() == sum(p.numel() for p in TiedTiny().parameters())
    return counts


@pytest.mark.parametrize("layout", ["dp2", "dp4", "hsdp2x1", "hsdp2x2", "hsdp4x1"])
def test_each_element_has_exactly_one_owner(world: World, layout: str) -> None:
    for counts in world.run(_owned, Layout.parse(layout).world, layout):
        assert len(counts) == len(TiedTiny().state_dict()) - 1, "a tied copy owns nothing"
        for name, count in counts.items():
            assert torch.equal(count, torch.ones_like(count)), name


def _replicates(layout: str) -> bool:
    at = Layout.parse(layout)
    model = realize(Blueprint.of(TiedTiny), Plan.of([FullyShard()], at), Topology.of(at, torch.device("cpu")), 0)
    return all(tensor.to_local().shape == tensor.shape for _, tensor, _ in model.trainable())


def test_dp_replicate_alone_replicates(world: World) -> None:
    """A 1-D mesh of replicas handed to fully_shard would shard instead."""
    assert world.run(_replicates, 2, "hsdp2x1") == [True, True]
    assert world.run(_replicates, 2, "dp2") == [False, False]


def test_a_layout_of_another_size_is_refused() -> None:
    with pytest.raises(LayoutError, match="4 ranks, but 1"):
        Topology.of(Layout(dp_shard=4), torch.device("cpu"))


def test_a_plain_tensor_is_owned_by_rank_zero_of_every_axis() -> None:
    layout = Layout.parse("hsdp2x2")
    owners = [rank for rank in range(4) if owns(torch.zeros(1), Topology(layout, torch.device("cpu"), rank))]
    assert owners == [0]


def _from_the_environment() -> tuple[int, float]:
    where = read_launcher(os.environ)
    device = init_process_groups(where, timeout=30)
    total = torch.tensor(float(where.rank), device=device)
    torch.distributed.all_reduce(total)
    destroy_process_groups()
    return where.rank, total.item()


def test_a_process_group_from_a_launchers_variables(world: World) -> None:
    assert world.run(_from_the_environment, 2, group=False) == [(0, 1.0), (1, 1.0)]


def _late() -> tuple[float, str]:
    """Seconds until rank 0 gives up on rank 1 in a group that was opened with a longer limit, and what it says."""
    where = read_launcher(os.environ)
    device = init_process_groups(where, timeout=60)
    group = torch.distributed.new_group([0, 1])
    torch.distributed.barrier(group)
    limit(1, device)
    began, said = time.monotonic(), ""
    try:
        if where.rank == 0:
            torch.distributed.all_reduce(torch.zeros(1), group=group)
        else:
            time.sleep(4)
    except RuntimeError as error:
        said = str(error)
    passed = time.monotonic() - began
    destroy_process_groups()
    return passed, said


def test_a_new_limit_holds_for_groups_that_are_open(world: World) -> None:
    (passed, said), _ = world.run(_late, 2, group=False, fresh=True)
    assert "imed out" in said and 0.5 < passed < 4


def _wrong_address() -> str:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = "9"
    os.environ["RANK"], os.environ["WORLD_SIZE"] = "1", "2"
    try:
        init_process_groups(read_launcher(os.environ), timeout=1)
    except PeerFailure as refusal:
        assert refusal.exit_code == 5
        return str(refusal)
    return "no refusal"


def test_an_address_where_nobody_listens_is_one_clear_message(world: World) -> None:
    (message,) = world.run(_wrong_address, 1, group=False)
    assert "rank 1 of 2" in message
    assert "waited 1 s at the start: rank 0 has not opened its store at 127.0.0.1:9" in message


def _no_host(rank: int) -> str:
    os.environ |= {"MASTER_ADDR": "no-such-host.invalid", "RANK": str(rank), "WORLD_SIZE": "2"}
    try:
        init_process_groups(read_launcher(os.environ), timeout=30)
    except LayoutError as refusal:
        return str(refusal)
    return "no refusal"


@pytest.mark.parametrize("rank", [0, 1])
def test_an_address_without_a_host_is_refused_at_once(world: World, rank: int) -> None:
    """By rank 0, too: torch's store would try to reach itself for minutes, without a word."""
    began = time.monotonic()
    (message,) = world.run(_no_host, 1, rank, group=False)
    assert time.monotonic() - began < 15
    assert "no-such-host.invalid" in message and "is MASTER_ADDR the host of rank 0" in message


def _waited_for_the_others(hurried: bool) -> tuple[str, float, list[str]]:
    os.environ |= {"RANK": "0", "WORLD_SIZE": "3"}
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("forge_parallel.launch.meeting").addHandler(handler)
    began = time.monotonic()
    try:
        init_process_groups(read_launcher(os.environ), timeout=60 if hurried else 1, patience=0.3, hurry=lambda: hurried)
    except PeerFailure as refusal:
        assert refusal.exit_code == (75 if hurried else 5), "75 asks for another start"
        return str(refusal), time.monotonic() - began, said
    raise AssertionError("it started alone")


def test_h2_a_rank_whose_peers_never_come_says_so_and_ends(world: World) -> None:
    ((message, _, said),) = world.run(_waited_for_the_others, 1, False, group=False)
    assert "the start: 1 of 3 ranks have come; rank 1, 2 did not come to 127.0.0.1:" in message
    assert len(said) >= 2 and all("rank 1, 2 did not come" in line for line in said)


@pytest.mark.slow
def test_fault_28_h2_a_rank_that_was_asked_to_stop_does_not_wait_long_for_its_peers(world: World) -> None:
    ((message, seconds, _),) = world.run(_waited_for_the_others, 1, True, group=False)
    assert "received a stop request and waited" in message and "did not come" in message and seconds < 10
