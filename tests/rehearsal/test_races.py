"""Streams of the devices: a wait that is missing is an error wherever it is missing, in whatever order the operators ran.

Each program has a version with a wait missing and the right one."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from harness.pool import World

pytestmark = pytest.mark.rehearsal


def _made(stream: Any) -> torch.Tensor:
    with torch.cuda.stream(stream):
        return torch.ones(4, device="cuda") * 2


def read_of_another_stream(side: Any, waits: bool) -> None:
    made = _made(side)
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    made + 1


def write_after_a_read(side: Any, waits: bool) -> None:
    made = torch.ones(4, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        made + 1
    if waits:
        torch.cuda.current_stream().wait_event(side.record_event())
    made.fill_(0)


def write_after_a_write(side: Any, waits: bool) -> None:
    made = _made(side)
    if waits:
        side.record_event().wait()
    made.fill_(0)


def read_of_a_view(side: Any, waits: bool) -> None:
    made = torch.zeros(6, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        made[3:].fill_(1)
    (made[:3] if waits else made) + 1


def wait_for_an_event_of_too_early(side: Any, waits: bool) -> None:
    event = side.record_event()
    made = _made(side)
    if waits:
        event.record(side)
    torch.cuda.current_stream().wait_event(event)
    made + 1


def wait_by_way_of_a_third(side: Any, waits: bool) -> None:
    made, third = _made(side), torch.cuda.Stream()
    if waits:
        third.wait_stream(side)
    torch.cuda.current_stream().wait_stream(third)
    made + 1


def wait_of_a_third_alone(side: Any, waits: bool) -> None:
    made, third = _made(side), torch.cuda.Stream()
    third.wait_stream(side)
    with torch.cuda.stream(third) if waits else torch.cuda.stream(None):
        made + 1


def wait_of_the_host(side: Any, waits: bool) -> None:
    made = _made(side)
    if waits:
        side.synchronize()
    made + 1


def wait_of_the_host_for_all(side: Any, waits: bool) -> None:
    made = _made(side)
    if waits:
        torch.cuda.synchronize()
    made + 1


def wait_of_the_host_for_a_number(side: Any, waits: bool) -> None:
    made = _made(side)
    with torch.cuda.stream(side):
        (made if waits else torch.ones(1, device="cpu")).sum().item()
    made + 1


def query_of_an_event(side: Any, waits: bool) -> None:
    made = _made(side)
    event = side.record_event()
    if waits:
        assert event.query()
    made + 1


def streams_of_torch(side: Any, waits: bool) -> None:
    """Names that every accelerator has."""
    stream = torch.Stream("cuda")
    with stream:
        assert torch.accelerator.current_stream() == stream
        made = torch.ones(4, device="cuda") * 2
        event = torch.Event("cuda")
        event.record()
    if waits:
        torch.accelerator.current_stream().wait_event(event)
    made + 1


def memory_freed_in_use(side: Any, waits: bool) -> None:
    made = torch.ones(4, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        made + 1
    if waits:
        made.record_stream(side)
    del made
    torch.ones(4, device="cuda")


def memory_freed_and_then_waited(side: Any, waits: bool) -> None:
    made = torch.ones(4, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        made + 1
    del made
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    torch.empty(4, device="cuda").fill_(1)


def storage_freed_in_use(side: Any, waits: bool) -> None:
    """As FSDP frees what it gathered."""
    made = torch.ones(4, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        made + 1
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    made.untyped_storage().resize_(0)
    torch.ones(4, device="cuda")


def gradients_of_another_stream(side: Any, waits: bool) -> None:
    """Each node of a backward pass runs on the stream of its forward one, and torch's engine waits where two meet."""
    x = torch.ones(4, device="cuda", requires_grad=True)
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = (x * 3).exp()
    torch.cuda.current_stream().wait_stream(side)
    (y * 2).sum().backward()
    assert x.grad is not None
    x.grad + 1


def copy_from_another_device(side: Any, waits: bool) -> None:
    """Copies run on the source's stream, and the target's one waits for them."""
    made = _made(side)
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    made.to("cuda:1") + 1


PROGRAMS = [
    (read_of_another_stream, "read after write", "aten::add on the default stream of cuda:0 reads a tensor of shape [4]"),
    (write_after_a_read, "write after read", "has not waited for aten::add on stream"),
    (write_after_a_write, "write after write", "aten::fill_"),
    (read_of_a_view, "read after write", "of shape [6]"),
    (wait_for_an_event_of_too_early, "read after write", "aten::mul"),
    (wait_by_way_of_a_third, "read after write", "aten::mul"),
    (wait_of_a_third_alone, "read after write", "aten::mul"),
    (wait_of_the_host, "read after write", "aten::mul"),
    (wait_of_the_host_for_all, "read after write", "aten::mul"),
    (wait_of_the_host_for_a_number, "read after write", "aten::mul"),
    (query_of_an_event, "read after write", "aten::mul"),
    (streams_of_torch, "read after write", "aten::mul"),
    (memory_freed_in_use, "write after read", "memory that was freed while it was in use"),
    (memory_freed_and_then_waited, "write after read", "record_stream"),
    (storage_freed_in_use, "write after read", "memory that was freed while it was in use"),
    (gradients_of_another_stream, "read after write", "aten::mul on stream"),
    (copy_from_another_device, "read after write", "aten::copy_"),
]


def _said(program: Callable[[Any, bool], None], waits: bool) -> str:
    before = torch.cuda.current_stream()
    try:
        program(torch.cuda.Stream(), waits)
        return ""
    except RuntimeError as error:
        return str(error)
    finally:
        torch.cuda.set_stream(before)
        torch.cuda.synchronize()


def _both(program: Callable[[Any, bool], None]) -> list[str]:
    return [_said(program, waits) for waits in (False, True)]


@pytest.mark.parametrize(("program", "kind", "part"), PROGRAMS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_missing_wait_is_an_error_and_the_right_program_is_none(devices: World, program: Any, kind: str, part: str) -> None:
    ((missing, right),) = devices.run(_both, 1, program, group=False)
    assert right == ""
    assert f"race ({kind})" in missing and part in missing
    assert re.search(r"on (the default stream|stream \d+) of cuda:0.* on (the default stream|stream \d+) of cuda:0", missing)


def _right_without_a_wait() -> None:
    """What looks like a race and is none."""
    side = torch.cuda.Stream()
    x = torch.ones(4, device="cuda", requires_grad=True)
    y = (x * 3).exp()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y.sum().backward()  # on the stream of the forward pass
    assert x.grad is not None
    x.grad + 1
    shared = torch.ones(4, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        shared + 1
    shared + 1  # both read
    with torch.cuda.stream(side):
        own = torch.ones(4, device="cuda")
    del own  # its stream alone has used it
    torch.ones(4, device="cuda")
    halves = torch.empty(4, device="cuda")
    halves[:2].fill_(0)
    with torch.cuda.stream(side):
        halves[2:].fill_(1)
    first, second = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    packed = {"stream_id": first.stream_id, "device_index": 0, "device_type": first.device_type}
    assert first != second and first == torch.cuda.Stream(**packed)
    assert torch.cuda.current_stream() == torch.cuda.default_stream() != first
    torch.cuda.synchronize()  # what is freed now may be used by the next test of this process, on another stream


def test_what_needs_no_wait(devices: World) -> None:
    devices.run(_right_without_a_wait, 1, group=False)
