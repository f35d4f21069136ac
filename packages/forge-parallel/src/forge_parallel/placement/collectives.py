"""Collectives over a group of ranks that the compiler can trace, with and without gradients.

Functions with torch's names have no gradient. The others pair a collective with its transpose (p ranks, sums over ranks):

                    forward                         backward
    Gather          all-gather along a dimension    sum, keep this rank's part of the dimension
    GatherWide      all-gather along dimension 0    the same, summed in at least fp32
    Scatter         sum, keep this rank's part      all-gather
    Copy            identity                        sum
    Sum             sum                             identity
    Join            all-gather for one use          keep this rank's part
    all_to_all      send rows to every rank         send them back

Every result is waited for, because an asynchronous result may not enter a compiled block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge_parallel.torch_private import functional


@dataclass(frozen=True)
class Ranks:
    """A process group in the form of constants, which the compiler can trace."""

    name: str
    size: int
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> "Ranks":
        """Returns the constants of a group that contains this rank."""
        return cls(str(group.group_name), group.size(), group.rank())


def all_gather(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Collective: concatenates tensors of equal shapes along `dim`. No gradient."""
    out = functional.wait_tensor(functional.all_gather_into_tensor(x.contiguous(), ranks.size, ranks.name))
    if dim == 0:
        return out
    return torch.cat(out.chunk(ranks.size), dim)  # the pattern that the compiler's asynchronous tensor parallelism matches


def reduce_scatter(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Collective: sums over ranks and returns this rank's part of `dim`, which the number of ranks divides. No gradient."""
    if dim:
        x = torch.cat(x.chunk(ranks.size, dim))
    return functional.wait_tensor(functional.reduce_scatter_tensor(x.contiguous(), "sum", ranks.size, ranks.name))


def all_reduce(x: Tensor, ranks: Ranks) -> Tensor:
    """Collective: sums over ranks. No gradient."""
    return functional.wait_tensor(functional.all_reduce(x.contiguous(), "sum", ranks.name))


def all_to_all_single(x: Tensor, send: Sequence[int], receive: Sequence[int], ranks: Ranks) -> Tensor:
    """Collective: (sum(send), ...) -> (sum(receive), ...). In rank order, send[i] rows are sent to rank i, and receive[i] rows
    come from it. No gradient."""
    return functional.wait_tensor(functional.all_to_all_single(x.contiguous(), list(receive), list(send), ranks.name))


def all_to_all(x: Tensor, send: Sequence[int], receive: Sequence[int], ranks: Ranks) -> Tensor:
    """Collective: `all_to_all_single` with a gradient, which is sent back the same way.

    Splits may be uneven, and 0. The number of rows that a rank sends to another must be the number that the other expects;
    otherwise the backend fails or hangs.
    """
    return _AllToAll.apply(x, tuple(send), tuple(receive), ranks)


def evenly(x: Tensor, ranks: Ranks) -> list[int]:
    """Returns equal splits of dimension 0, which the number of ranks divides."""
    return [x.shape[0] // ranks.size] * ranks.size


class Gather(torch.autograd.Function):
    """Collective: all-gather; backward: reduce-scatter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, dim: int) -> Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return all_gather(x, ranks, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return reduce_scatter(grads[0], ctx.ranks, ctx.dim), None, None


class GatherWide(torch.autograd.Function):
    """Collective: all-gather along dimension 0; backward: an all-to-all of shares, summed locally in at least fp32. It sends as
    much as a reduce-scatter and rounds once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return all_gather(x, ranks, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        splits = evenly(grads[0], ctx.ranks)
        shares = all_to_all_single(grads[0], splits, splits, ctx.ranks).unflatten(0, (ctx.ranks.size, -1))
        return shares.sum(0), None  # torch sums narrow dtypes in fp32


class Scatter(torch.autograd.Function):
    """Collective: reduce-scatter; backward: all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, dim: int) -> Tensor:
        ctx.ranks, ctx.dim = ranks, dim
        return reduce_scatter(x, ranks, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return all_gather(grads[0], ctx.ranks, ctx.dim), None, None


class Copy(torch.autograd.Function):
    """Collective: identity; backward: all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return all_reduce(grads[0], ctx.ranks), None


class Sum(torch.autograd.Function):
    """Collective: all-reduce; backward: identity."""

    @staticmethod
    def forward(_: Any, x: Tensor, ranks: Ranks) -> Tensor:
        return all_reduce(x, ranks)

    @staticmethod
    @once_differentiable
    def backward(_: Any, *grads: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grads[0], None


class Join(torch.autograd.Function):
    """Collective: all-gather along the last dimension, cut to `width`, of a tensor that all ranks use equally; backward: slices
    out this rank's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, width: int) -> Tensor:
        ctx.ranks, ctx.width, ctx.share = ranks, width, x.shape[-1]
        return all_gather(x, ranks, x.dim() - 1)[..., :width].clone()  # a view would confuse FSDP's hooks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        start = ctx.ranks.rank * ctx.share
        part = grads[0][..., start : start + ctx.share]
        return torch.nn.functional.pad(part, (0, ctx.share - part.shape[-1])), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, send: tuple[int, ...], receive: tuple[int, ...], ranks: Ranks) -> Tensor:
        ctx.send, ctx.receive, ctx.ranks = send, receive, ranks
        return all_to_all_single(x, send, receive, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return all_to_all_single(grads[0], ctx.receive, ctx.send, ctx.ranks), None, None, None
