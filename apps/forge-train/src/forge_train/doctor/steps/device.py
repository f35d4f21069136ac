"""Is every device alive? Its memory gives back what was written, and equal products are equal bits."""

from collections.abc import Iterator
from time import perf_counter

import torch

from forge_core.terminal import size
from forge_parallel import accelerator
from forge_train.doctor.step import Check, Settings, Skip
from forge_train.doctor.steps.measure import device

_SHARE = 0.9
_CHUNK = 1 << 30
_SECONDS = 15.0
_SIZE = 4096


def examine_device(_: Settings) -> Iterator[Check]:
    """The step; one pair of checks for each device."""
    kind = device().type
    if kind == "cpu":
        raise Skip("no accelerator is seen", "see the step torch for the reason")
    for index in range(accelerator.count()):
        one = accelerator.use(index)
        yield _memory(one)
        accelerator.forget_cache()
        yield _products(one, _SECONDS)


def _memory(one: torch.device) -> Check:
    """Numbers that tell their place are written to nearly all of the memory and read when all are there."""
    name = f"memory of device {one.index}"
    free = accelerator.free_memory(one)
    if free is None:
        return Check(name, "SKIPPED", "this device does not say how much it has")
    wanted = int(free * _SHARE) // _CHUNK * _CHUNK or int(free * _SHARE) // 8 * 8
    chunk = min(wanted, _CHUNK)
    expected = "every number is read as it was written"
    try:
        held = [torch.arange(start, start + chunk // 8, device=one) for start in range(0, wanted // 8, chunk // 8)]
    except torch.OutOfMemoryError as cause:
        remedy = "does another process hold memory (nvidia-smi)? end it, or restart the node"
        return Check(name, "FAIL", str(cause).partition(".")[0], expected=f"{size(wanted)} can be had", remedy=remedy)
    wrong = 0
    for number, written in enumerate(held):
        start = number * (chunk // 8)
        wrong += int((written != torch.arange(start, start + chunk // 8, device=one)).sum())
    if wrong:
        remedy = "take the device out of service: look for ECC errors (nvidia-smi -q -d ECC)"
        return Check(name, "FAIL", f"{wrong} of {wanted // 8} numbers changed", expected=expected, remedy=remedy)
    return Check(name, "PASS", f"{size(wanted)} of {size(free)} free", expected=expected)


def _products(one: torch.device, seconds: float) -> Check:
    """The same product over and over: what differs in a single bit was computed wrongly."""
    name, expected = f"products of device {one.index}", "the same bits each time"
    generator = torch.Generator(one).manual_seed(0)
    dtype = torch.bfloat16
    a, b = (torch.randn(_SIZE, _SIZE, generator=generator, device=one, dtype=dtype) for _ in range(2))
    first, times, end = a @ b, 0, perf_counter() + seconds
    while perf_counter() < end or not times:
        times += 1
        if not torch.equal(a @ b, first):
            remedy = "take the device out of service: it corrupts numbers silently"
            return Check(name, "FAIL", f"product {times + 1} differs", expected=expected, remedy=remedy)
    return Check(name, "PASS", f"{times + 1} products", expected=expected)
