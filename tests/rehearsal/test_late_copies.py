"""Copies that the host does not wait for: what they bring is there when it has, and what they take is left alone until then."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from forge_ckpt.format.tensor_bytes import way_to
from forge_parallel.step.step import DeferredRead
from harness.pool import World

pytestmark = pytest.mark.rehearsal


def _pinned(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).pin_memory()


def _brought() -> dict[str, list[float]]:
    """What the host sees of copies from a device."""
    threes, found = torch.ones(2, device="cuda") * 3, {}
    into = _pinned(1, 1)
    into.copy_(threes, non_blocking=True)
    event = torch.cuda.current_stream().record_event()
    found["not waited for"] = into.tolist()
    event.synchronize()
    found["waited for"] = into.tolist()
    made = threes.to("cpu", non_blocking=True)
    found["pinned by torch"] = made.tolist()
    torch.cuda.synchronize()
    found["and waited for"] = made.tolist()
    early = torch.cuda.current_stream().record_event()
    made = threes.to("cpu", non_blocking=True)
    early.synchronize()
    found["an event before the copy"] = made.tolist()
    into.copy_(threes, non_blocking=True)
    first = torch.cuda.current_stream().record_event()
    into[1:].copy_(threes[1:] + 1, non_blocking=True)
    first.synchronize()
    found["a buffer used again"] = into.tolist()
    torch.cuda.current_stream().synchronize()
    found["and its second copy"] = into.tolist()
    into.copy_(threes, non_blocking=True)
    threes.sum().item()
    found["by a number behind it"] = into.tolist()
    plain, across = torch.zeros(2), torch.zeros(2, 2).pin_memory().t()
    plain.copy_(threes, non_blocking=True)
    across.copy_(torch.ones(2, 2, device="cuda"), non_blocking=True)
    found["neither pinned nor in order"] = plain.tolist() + across.flatten().tolist()
    return found


def test_what_a_copy_brings_is_nan_until_the_host_has_waited(devices: World) -> None:
    (found,) = devices.run(_brought, 1, group=False)
    nan, three = [math.nan] * 2, [3.0] * 2
    assert {name: str(values) for name, values in found.items()} == {
        "not waited for": str(nan),
        "waited for": str(three),
        "pinned by torch": str(nan),
        "and waited for": str(three),
        "an event before the copy": str(nan),
        "a buffer used again": str([3.0, math.nan]),
        "and its second copy": str([3.0, 4.0]),
        "by a number behind it": str(three),
        "neither pinned nor in order": str(three + [1.0] * 4),
    }


def overwritten(waits: bool) -> None:
    source = _pinned(1, 2)
    source.to("cuda", non_blocking=True)
    if waits:
        torch.cuda.synchronize()
    source.fill_(0)
    torch.cuda.synchronize()


def overwritten_and_freed(waits: bool) -> None:
    """Memory that is freed is kept until copies are over; it is the change that was too early."""
    source = _pinned(1, 2)
    source.to("cuda", non_blocking=True)
    if not waits:
        source.fill_(0)
    del source
    torch.cuda.synchronize()


def overwritten_behind_another_event(waits: bool) -> None:
    source = _pinned(1, 2)
    early = torch.cuda.current_stream().record_event()
    source.to("cuda", non_blocking=True)
    late = torch.cuda.current_stream().record_event()
    (late if waits else early).synchronize()
    source.fill_(0)
    torch.cuda.synchronize()


def through_the_host(waits: bool) -> None:
    """From a device into pinned memory and back to it: streams order that among themselves."""
    side, middle = torch.cuda.Stream(), _pinned(0, 0)
    middle.copy_(torch.ones(2, device="cuda"), non_blocking=True)
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        back = middle.to("cuda", non_blocking=True)
        assert not waits or back.tolist() == [1.0, 1.0]


def changed_in_another_dtype(_: bool) -> None:
    """torch converts the dtype at once, into new memory."""
    source = _pinned(1, 2)
    source.to("cuda", torch.float64, non_blocking=True)
    source.fill_(0)
    torch.cuda.synchronize()


CHANGED = "race: the host changed pinned memory, of which a copy of 8 bytes"


def _said(program: Callable[[bool], None], waits: bool) -> str:
    try:
        program(waits)
        return ""
    except RuntimeError as error:
        return str(error)
    finally:
        torch.cuda.synchronize()


def _both(program: Callable[[bool], None]) -> list[str]:
    return [_said(program, waits) for waits in (False, True)]


@pytest.mark.parametrize(
    ("program", "part"),
    [
        (overwritten, CHANGED),
        (overwritten_and_freed, CHANGED),
        (overwritten_behind_another_event, CHANGED),
        (through_the_host, "race (read after write): aten::copy_ on stream"),
        (changed_in_another_dtype, ""),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_copy_takes_is_left_alone_until_it_is_over(devices: World, program: Any, part: str) -> None:
    ((missing, right),) = devices.run(_both, 1, program, group=False)
    assert right == ""
    assert missing.startswith(part) and bool(missing) == bool(part)


def _copies_of_forge() -> dict[str, bool]:
    device = torch.device("cuda", 0)
    bytes_ = torch.arange(8, dtype=torch.uint8)
    numbers = DeferredRead(torch.ones(2, device=device) * 3).numbers()
    way = way_to(device, 8)
    assert way is not None
    there = bytes_.to(device)
    landing = way.copy(way.memory, there)
    before = way.memory.tolist()
    landing()
    after = way.memory.tolist()
    back = torch.zeros_like(there)
    way.copy(back, way.memory)()
    way.memory.fill_(0)  # only after the landing
    return {
        "numbers": numbers == [3.0, 3.0],
        "not there": before == [255] * 8,
        "there": after == bytes_.tolist(),
        "back": back.tolist() == bytes_.tolist(),
    }


def test_copies_of_forge_are_waited_for(devices: World) -> None:
    (found,) = devices.run(_copies_of_forge, 1, group=False)
    assert all(found.values()), found
