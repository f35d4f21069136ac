"""The device under test, and time on it."""

from collections.abc import Callable
from time import perf_counter

import torch

_CPU = torch.device("cpu")


def device() -> torch.device:
    """The accelerator of this process, else the CPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return _CPU if found is None else found


def wait(of: torch.device) -> None:
    """Returns when the device has done all work."""
    if of.type != "cpu":
        torch.accelerator.synchronize(of)


def fastest(work: Callable[[], object], of: torch.device, budget: float = 0.3, batch: int = 4) -> float:
    """Seconds of one call of `work`: of the fastest of many batches within `budget` seconds, after one to warm up."""
    work()
    wait(of)
    best, end = float("inf"), perf_counter() + budget
    while True:
        began = perf_counter()
        for _ in range(batch):
            work()
        wait(of)
        now = perf_counter()
        best = min(best, (now - began) / batch)
        if now >= end:
            return max(best, 1e-9)
