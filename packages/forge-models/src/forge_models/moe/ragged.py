"""Tokens of which most slots are dropped, as on a rank that has few of the experts: work is proportional to the slots that count.

Slots have two orders: by expert, in which experts take them, and by token, in which they are added up. Sums run over the slots of
a token in their order, so they have the same bits every time; an index_add would not, on a GPU.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def _sums(slots: Tensor, lengths: Tensor) -> Tensor:
    """(S, width) in the order of tokens -> (N, width): token t has the next lengths[t] of them."""
    if not len(slots):
        return slots.new_zeros(len(lengths), slots.shape[1])
    return torch.segment_reduce(slots, "sum", lengths=lengths, axis=0, unsafe=True, initial=0)


class _SomeToExperts(torch.autograd.Function):
    """(N, width) -> (S, width) in the order of experts.

    Args:
        x: (N, width).
        order: (S,) flat number of each slot, by expert.
        places: (S,) where each slot, in the order of tokens, is in `order`.
        lengths: (N,) slots of each token.
        top_k: slots that a token could have.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor, lengths: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(places, lengths)
        return x.index_select(0, order // top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        (grad,), (places, lengths) = grads, ctx.saved_tensors
        wide = torch.promote_types(grad.dtype, torch.float32)
        return _sums(grad.index_select(0, places).to(wide), lengths).to(grad.dtype), None, None, None, None


class _SomeToTokens(torch.autograd.Function):
    """Rows (S, width) in the order of experts -> (N, width), each multiplied by its weight and added to its token.

    Args:
        rows: (S, width); further ones are not read.
        weights: (N, top_k).
        order: as in `_SomeToExperts`.
        slots: (S,) flat numbers in the order of tokens.
        places: as in `_SomeToExperts`.
        lengths: as in `_SomeToExperts`.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, slots: Tensor, places: Tensor, lengths: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order, slots, places, lengths)
        return _sums(rows.index_select(0, places) * weights.flatten()[slots].unsqueeze(1), lengths).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:  # type: ignore[override]
        (grad,), (rows, weights, order, slots, places, _) = grads, ctx.saved_tensors
        top_k, flat = weights.shape[1], weights.flatten()
        by_row = (grad.index_select(0, order // top_k) * flat[order].unsqueeze(1)).to(rows.dtype)
        products = (rows.index_select(0, places) * grad.index_select(0, slots // top_k)).sum(1, dtype=weights.dtype)
        by_weight = torch.zeros_like(flat).scatter_(0, slots, products).view_as(weights)
        return by_row, by_weight, None, None, None, None
