"""How fast this CPU multiplies matrices in a number format, measured in a moment."""

from collections.abc import Callable
from time import perf_counter

import torch

from forge_core.machine import multiplies_bf16

SIZE = 256  # 2 * 256^3 = 34 MFLOP: 0.12 s on a CPU that manages 0.28 GFLOP/s, the slowest seen
SECONDS = 0.08


def speed(dtype: torch.dtype, clock: Callable[[], float] = perf_counter) -> float:
    """FLOP/s of the fastest of some products of (256, 256) matrices; takes 0.08 s, or as long as one product."""
    a = torch.ones(SIZE, SIZE, dtype=dtype)
    begin, fastest = clock(), float("inf")
    while True:
        start = clock()
        torch.mm(a, a)
        end = clock()
        fastest = min(fastest, end - start)
        if end - begin >= SECONDS:
            return 2 * SIZE**3 / max(fastest, 1e-9)


def bf16_remark(clock: Callable[[], float] = perf_counter) -> str | None:
    """What to say of a run in bf16 on this CPU: both speeds, where bf16 is the slower one. Measured only where the
    processor does not claim units for it."""
    if multiplies_bf16():
        return None
    bf16, fp32 = speed(torch.bfloat16, clock), speed(torch.float32, clock)
    if bf16 >= fp32:
        return None
    return (
        f"warning: this CPU has no bf16 units: {bf16 / 1e9:.3g} GFLOP/s in bf16, {fp32 / 1e9:.3g} in fp32, "
        f"{fp32 / bf16:.0f} times as fast; set precision.compute = 'fp32'"
    )
