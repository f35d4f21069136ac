"""Collectives with gradients over a group of ranks, traceable by the compiler.

Each pairs a collective with its transpose (p ranks, sums over them):

    forward                         backward
    gather along a dimension        sum, keep the own part of that dimension
    sum, keep the own part          gather
    identity                        sum
    sum                             identity
    join: gather for one use        keep the own part
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

functional = torch.ops._c10d_functional


@dataclass(frozen=True)
class Ranks:
    """A process group as the compiler can hold it: constants."""

    name: str
    size: int
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> "Ranks":
        """The group that this rank is in."""
        return cls(group.group_name, group.size(), group.rank())


def all_gather(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Concatenates the tensors of all ranks, which have one shape, along `dim`. No gradient."""
    out = functional.wait_tensor(functional.all_gather_into_tensor(x.contiguous(), ranks.size, ranks.name))
    if dim == 0:
        return out
    return torch.cat(out.chunk(ranks.size), dim)  # the form that the compiler's asynchronous tensor parallelism looks for


def reduce_scatter(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Sums over ranks; each keeps its part of `dim`, which the number of ranks divides. No gradient."""
    if dim:
        x = torch.cat(x.chunk(ranks.size, dim))
    return functional.wait_tensor(functional.reduce_scatter_tensor(x.contiguous(), "sum", ranks.size, ranks.name))


def all_reduce(x: Tensor, ranks: Ranks) -> Tensor:
    """Sums over ranks. No gradient."""
    return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", ranks.name))


class Gather(torch.autograd.Function):
    """All-gather; backward: reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, dim: int) -> Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return all_gather(x, ranks, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return reduce_scatter(grads[0], ctx.ranks, ctx.dim), None, None


class Scatter(torch.autograd.Function):
    """Reduce-scatter; backward: all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, dim: int) -> Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return reduce_scatter(x, ranks, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return all_gather(grads[0], ctx.ranks, ctx.dim), None, None


class Copy(torch.autograd.Function):
    """Identity; backward: all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return all_reduce(grads[0], ctx.ranks), None


class Sum(torch.autograd.Function):
    """All-reduce; backward: identity."""

    @staticmethod
    def forward(_: Any, x: Tensor, ranks: Ranks) -> Tensor:
        return all_reduce(x, ranks)

    @staticmethod
    @once_differentiable
    def backward(_: Any, *grads: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grads[0], None


class Join(torch.autograd.Function):
    """All-gather along the last dimension of what all ranks then use alike, cut to `width`; backward: the own part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, width: int) -> Tensor:
        ctx.ranks, ctx.width, ctx.share = ranks, width, x.shape[-1]
        return all_gather(x, ranks, x.dim() - 1)[..., :width].clone()  # a view would confuse FSDP's hooks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        start = ctx.ranks.rank * ctx.share
        mine = grads[0][..., start : start + ctx.share]
        return torch.nn.functional.pad(mine, (0, ctx.share - mine.shape[-1])), None, None
