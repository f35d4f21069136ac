"""The device under test, and time on it."""

from collections.abc import Callable
from time import perf_counter

import torch

from forge_parallel import accelerator
from forge_parallel.accelerator import wait


def device() -> torch.device:
    """Returns the accelerator of this process, else the CPU."""
    return torch.device(accelerator.kind())


def fastest(work: Callable[[], object], of: torch.device, budget: float = 0.3, batch: int = 4) -> float:
    """Returns the seconds per call of `work` in the fastest of many batches within `budget` seconds, after a warm-up batch."""
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
