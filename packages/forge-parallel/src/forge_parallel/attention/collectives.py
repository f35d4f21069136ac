"""Collectives along dimension 0, with their gradients, that a compiler can trace.

Groups go by name, as functional collectives want them. Every result is waited for: one that is still on its way may not enter
a compiled block.
"""

from typing import Any

import torch
from torch import Tensor

collective = torch.ops._c10d_functional


def gather(x: Tensor, ranks: int, group: str) -> Tensor:
    """(n, ...) -> (ranks * n, ...): what all ranks hold, in rank order. Not differentiable."""
    return collective.wait_tensor(collective.all_gather_into_tensor(x.contiguous(), ranks, group))


def exchange(x: Tensor, ranks: int, group: str) -> Tensor:
    """(ranks * n, ...) -> the same shape: share i goes to rank i, what rank i sends here becomes share i. Not differentiable."""
    shares = [x.shape[0] // ranks] * ranks
    return collective.wait_tensor(collective.all_to_all_single(x.contiguous(), shares, shares, group))


def gathered(x: Tensor, ranks: int, group: str) -> Tensor:
    """`gather` with its gradient: each rank gets the sum of what all ranks have for its share.

    Shares are exchanged and then summed here, in at least fp32, which moves the bytes of a reduce-scatter and rounds once.
    """
    return _Gather.apply(x, ranks, group)


def exchanged(x: Tensor, ranks: int, group: str) -> Tensor:
    """`exchange` with its gradient, which goes back the same way."""
    return _Exchange.apply(x, ranks, group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, group: str) -> Tensor:
        ctx.ranks, ctx.group = ranks, group
        return gather(x, ranks, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        shares = exchange(grads[0], ctx.ranks, ctx.group).unflatten(0, (ctx.ranks, -1))
        return shares.sum(0), None, None  # torch sums low precision in fp32


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, group: str) -> Tensor:
        ctx.ranks, ctx.group = ranks, group
        return exchange(x, ranks, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return exchange(grads[0], ctx.ranks, ctx.group), None, None
