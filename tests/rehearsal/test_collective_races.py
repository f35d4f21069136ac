"""Collectives take place on streams of their own: what they read and write is used after `wait`, also by torch's FSDP."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp import fully_shard

from harness.pool import World
from rehearsal.ranks import own_device

pytestmark = pytest.mark.rehearsal


def sum_not_waited_for(waits: bool) -> None:
    mine = torch.ones(4, device="cuda")
    work = dist.all_reduce(mine, async_op=True)
    if waits:
        work.wait()
    mine + 1


def input_written_before_the_wait(waits: bool) -> None:
    mine, all_ = torch.ones(4, device="cuda"), torch.empty(2, 4, device="cuda")
    work = dist.all_gather(list(all_), mine, async_op=True)
    if waits:
        work.wait()  # type: ignore[union-attr]
    mine.fill_(0)


def received_and_not_waited_for(waits: bool) -> None:
    mine, theirs, other = torch.ones(4, device="cuda"), torch.empty(4, device="cuda"), 1 - dist.get_rank()
    sent, received = dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, theirs, other)])
    sent.wait()
    if waits:
        received.wait()
    theirs + 1


def waited_for_on_another_stream(waits: bool) -> None:
    mine, side = torch.ones(4, device="cuda"), torch.cuda.Stream()
    work = dist.all_reduce(mine, async_op=True)
    with torch.cuda.stream(side):
        work.wait()
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    mine + 1


def computed_on_another_stream(waits: bool) -> None:
    """A collective waits for the stream that calls it, and for no other."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        mine = torch.ones(4, device="cuda")
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    dist.all_reduce(mine)


def functional_and_raw(waits: bool) -> None:
    mine = torch.ones(4, device="cuda")
    total = torch.ops._c10d_functional.all_reduce(mine, "sum", dist.group.WORLD.group_name)  # type: ignore[union-attr]
    if waits:
        torch.ops._c10d_functional.wait_tensor(total)
    try:
        total + 1
    finally:
        torch.ops._c10d_functional.wait_tensor(total)


PROGRAMS = [
    (sum_not_waited_for, "read after write"),
    (input_written_before_the_wait, "write after read"),
    (received_and_not_waited_for, "read after write"),
    (waited_for_on_another_stream, "read after write"),
    (computed_on_another_stream, "write after write"),
    (functional_and_raw, "read after write"),
]


def _said(program: Callable[[bool], None], waits: bool) -> str:
    try:
        program(waits)
        return ""
    except RuntimeError as error:
        return str(error)
    finally:
        torch.cuda.synchronize()


def _both(program: Callable[[bool], None]) -> list[str]:
    with own_device():
        right = _said(program, True)
        return [_said(program, False), right]


@pytest.mark.parametrize(("program", "kind"), PROGRAMS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_collective_that_is_not_waited_for_is_an_error(devices: World, program: Any, kind: str) -> None:
    for missing, right in devices.run(_both, 2, program, group=False):
        assert right == ""
        assert f"race ({kind})" in missing


def _needs_no_wait() -> None:
    with own_device():
        mine = torch.ones(4, device="cuda")
        dist.all_reduce(mine)  # on the stream of the caller
        functional.all_reduce(mine, "sum", dist.group.WORLD) + 1  # the result waits when it is used
        work = dist.all_reduce(mine, async_op=True)
        del mine, work  # torch keeps the memory
        torch.ones(4, device="cuda")
        dist.barrier()


def test_what_needs_no_wait(devices: World) -> None:
    devices.run(_needs_no_wait, 2, group=False)


def _sharded_step(dropped: str | None) -> str:
    """A step of torch's FSDP; one kind of wait of its streams does nothing."""
    with own_device(), pytest.MonkeyPatch.context() as patch:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).to("cuda")
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        if dropped is not None:
            patch.setattr(torch.cuda.Stream, dropped, lambda *_: None)
        try:
            for _ in range(2):
                model(torch.ones(2, 4, device="cuda")).sum().backward()
                torch.optim.SGD(model.parameters(), lr=0.1).step()
            return ""
        except RuntimeError as error:
            return str(error)


@pytest.mark.parametrize("dropped", [None, "wait_event", "wait_stream"])
def test_a_wait_that_fsdp_leaves_out_is_an_error(devices: World, dropped: str | None) -> None:
    for said in devices.run(_sharded_step, 2, dropped, group=False, fresh=dropped is not None):
        assert ("race" in said) == (dropped is not None), said
