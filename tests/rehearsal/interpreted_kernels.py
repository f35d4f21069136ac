"""The kernels of flash-linear-attention in Triton's interpreter, on a CPU: prints the worst relative errors as JSON.

A program of its own, because Triton must know before its import that it interprets.
"""

import importlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton.runtime.autotuner
import triton.runtime.interpreter
from torch import Tensor

from forge_models.blocks.fla_kernels import CHANNEL_DELTA, GATED_DELTA, STATE_SPACE, RuleKernel, run

LENGTH = 70
"""More tokens than a chunk has."""


class _Index(int):
    """A number of a loop. Compiled kernels convert them with `to`, which the interpreter's plain numbers do not have."""

    def to(self, dtype: Any) -> Any:
        return triton.runtime.interpreter._implicit_cvt(int(self)).to(dtype)


def _indices(*bounds: Any) -> Iterator[_Index]:
    return map(_Index, range(*map(int, bounds)))


def interpret() -> None:
    """Prepares the imported kernels for the interpreter, which times none of their variants: the first one runs."""
    triton.runtime.autotuner.Autotuner.do_bench = staticmethod(lambda call, quantiles=None: [0.0] * 3)
    for name, module in sys.modules.items():
        if name.startswith("fla."):
            module.__dict__["range"] = _indices


def error(
    kernel: RuleKernel, heads: tuple[int, int], widths: tuple[int, int], documents: Tensor | None, with_state: bool
) -> float:
    """Returns the largest relative error of values and gradients against plain torch in fp64, for rows of `LENGTH` tokens."""
    draw, (rows, length) = torch.Generator().manual_seed(3), (2, LENGTH)
    key_heads, value_heads = heads

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    q, k = (torch.nn.functional.normalize(normal(rows, length, key_heads, widths[0]), dim=-1) for _ in range(2))
    g = -normal(rows, length, value_heads, *((widths[0],) if kernel.per_channel else ())).abs()
    given = [q, k, normal(rows, length, value_heads, widths[1]), g, normal(rows, length, value_heads).sigmoid()]
    given += [] if kernel.delta else [normal(value_heads)]
    given += [normal(rows, value_heads, *widths)] if with_state else []
    weights: list[Tensor] = [normal(rows, length, value_heads, widths[1]), normal(rows, value_heads, *widths)]
    results: list[list[Tensor]] = []
    for exact in (False, True):
        made = [(x if exact else x.float()).detach().requires_grad_() for x in given]
        inputs, state = (made[:-1], made[-1]) if with_state else (made, None)
        out, after = kernel.torch(*inputs, documents=documents, state=state) if exact else run(kernel, inputs, documents, state)
        total = (out.double() * weights[0]).sum() + (after.double() * weights[1]).sum()
        results.append([out, after, *torch.autograd.grad(total, made)])
    return max(((one.double() - other).norm() / other.norm()).item() for one, other in zip(*results, strict=True))


def main() -> None:
    for kernel in (GATED_DELTA, CHANNEL_DELTA, STATE_SPACE):
        importlib.import_module(kernel.module)
    interpret()
    packed = torch.stack((torch.arange(LENGTH) // 27, torch.zeros(LENGTH, dtype=torch.int64)))
    packed[1, 64:] = 1  # a border between two chunks
    short = torch.arange(LENGTH).expand(2, -1) // 6
    cases = {
        "delta": (GATED_DELTA, (2, 4), None, False),
        "delta, documents": (GATED_DELTA, (2, 4), packed, True),
        "delta, short documents": (GATED_DELTA, (2, 2), short, False),
        "channels": (CHANNEL_DELTA, (1, 1), None, True),
        "channels, documents": (CHANNEL_DELTA, (1, 1), packed, True),
        "space": (STATE_SPACE, (2, 4), None, True),
        "space, documents": (STATE_SPACE, (2, 4), packed, True),
        "space, short documents": (STATE_SPACE, (2, 2), short, False),
    }
    print(json.dumps({name: error(kernel, heads, (16, 32), *more) for name, (kernel, heads, *more) in cases.items()}))


if __name__ == "__main__":
    main()
