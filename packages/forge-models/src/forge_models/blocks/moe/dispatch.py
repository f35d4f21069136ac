"""Dispatches tokens to their experts inside one process. Nothing here synchronizes with the device.

A slot is one choice of an expert by a token. Experts process slots sorted by expert; outputs are summed in the order of tokens.
Sums run over the slots of a token in order and are therefore bitwise reproducible, which index_add is not on a GPU. If most slots
are dropped, as on a rank that has few of the experts, work is proportional to the remaining slots. `limited` drops the slots
beyond an expert's capacity.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class LocalDispatch:
    """Dispatcher for one process: sorts slots by expert, runs every expert on its tokens, and adds the results up by token."""

    def __call__(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        expert_fn: Callable[[Tensor, Tensor], Tensor],
        num_experts: int,
        slots: int | None = None,
        overlap_with: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """Returns the weighted sum of the chosen experts' outputs, (N, embed) in the dtype of `x`; bitwise reproducible.

        Args:
            x: (N, embed) tokens.
            experts: (N, top_k) int64 expert of each slot; -1 = dropped, which adds nothing.
            weights: (N, top_k) combine weights; the sum is computed in their dtype.
            expert_fn: (tokens sorted by expert, tokens per expert (num_experts,) int64) -> outputs in the same order. Rows after
                those of the last expert belong to dropped slots; their outputs are not read.
            num_experts: number of experts in the layer.
            slots: number of slots that are not dropped, if the host knows it; dropped slots then get no row.
            overlap_with: returns (N, embed), which is added to the result.
        """
        whole = slots == experts.numel()
        flat = experts.flatten()
        keys, order = (flat if whole else flat.where(flat >= 0, num_experts)).sort(stable=True)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        counts = torch.searchsorted(keys, torch.arange(num_experts + 1, device=keys.device)).diff()
        if whole or slots is None:
            kept, at = None if whole else experts >= 0, places.view_as(experts)
            rows = _ToExperts.apply(x, order, at, kept)
            y = _ToTokens.apply(expert_fn(rows, counts), weights, at, kept)
        else:
            order, lengths = order[:slots], (experts >= 0).sum(1)
            by_token = torch.nonzero_static(flat >= 0, size=slots).squeeze(1)
            at = places[by_token]
            rows = _SomeToExperts.apply(x, order, at, lengths, experts.shape[1])
            y = _SomeToTokens.apply(expert_fn(rows, counts), weights, order, by_token, at, lengths)
        return y if overlap_with is None else y + overlap_with()


def _rows(source: Tensor, places: Tensor, kept: Tensor | None) -> Tensor:
    """Returns (N, width): row places[t] of `source` for every token t, or zero if the slot was dropped."""
    rows = source.index_select(0, places)  # in eager mode on a CPU several times as fast as source[places]
    # Multiplying by a mask would keep NaN, which rows of dropped slots may hold.
    return rows if kept is None else rows.masked_fill_(~kept.unsqueeze(1), 0)


def _slots(places: Tensor, kept: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
    masks = [None] * places.shape[1] if kept is None else list(kept.unbind(1))
    return list(zip(places.unbind(1), masks, strict=True))


class _ToExperts(torch.autograd.Function):
    """x[order // top_k]. The backward sums the slots of a token in order, which index_add does not on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor, kept: Tensor | None) -> Tensor:
        ctx.save_for_backward(places, kept)
        return x.index_select(0, order // places.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (grad,), (places, kept) = grads, ctx.saved_tensors
        total = grad.new_zeros(places.shape[0], grad.shape[1], dtype=torch.promote_types(grad.dtype, torch.float32))
        for at, mask in _slots(places, kept):
            total += _rows(grad, at, mask)
        return total.to(grad.dtype), None, None, None


class _ToTokens(torch.autograd.Function):
    """Sum over a token's slots of weight * row. Saves the rows and the weights, but no copy per slot."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, places: Tensor, kept: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weights, places, kept)
        total = weights.new_zeros(places.shape[0], rows.shape[1])
        for (at, mask), weight in zip(_slots(places, kept), weights.unbind(1), strict=True):
            total.addcmul_(_rows(rows, at, mask), weight.unsqueeze(1))
        return total.to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:  # type: ignore[override]
        (grad,), (rows, weights, places, kept) = grads, ctx.saved_tensors
        # One slot at a time, because the products of all slots in the dtype of the weights would not fit into the cache.
        by_row, by_weight = torch.empty_like(rows), []
        for (at, mask), weight in zip(_slots(places, kept), weights.unbind(1), strict=True):
            by_row.index_copy_(0, at, (grad * weight.unsqueeze(1)).to(rows.dtype))
            by_weight.append((_rows(rows, at, mask) * grad).sum(1, dtype=weights.dtype))
        return by_row, torch.stack(by_weight, 1), None, None


@torch.no_grad()
def limited(experts: Tensor, weights: Tensor, factor: float, num_experts: int) -> Tensor:
    """Returns `experts` with -1 for dropped slots (GShard, Lepikhin et al., 2020).

    An expert keeps the ceil(factor * slots / num_experts) slots with the largest weights, the earlier one among equals. Slots
    that are already -1, those of padding, neither count nor use capacity. Does not synchronize with the device.

    Args:
        experts: (N, top_k) int64 expert of each slot, or -1.
        weights: (N, top_k) combine weights.
        factor: capacity factor; 1 is enough if the load is even.
        num_experts: number of experts.
    """
    flat = experts.flatten()
    by_weight = weights.flatten().argsort(descending=True, stable=True)
    keys, order = flat.where(flat >= 0, num_experts)[by_weight].sort(stable=True)
    borders = torch.searchsorted(keys, torch.arange(num_experts + 1, device=keys.device))
    most = (borders[num_experts].double() * (factor / num_experts)).ceil()
    place = torch.arange(len(keys), device=keys.device) - borders[keys]
    kept = torch.empty_like(flat, dtype=torch.bool).scatter_(0, by_weight[order], place < most)
    return experts.where(kept.view_as(experts), -1)


def _sums(slots: Tensor, lengths: Tensor) -> Tensor:
    """Sums slots by token: (S, width) in the order of tokens -> (N, width); token t has the next lengths[t] slots."""
    if not len(slots):
        return slots.new_zeros(len(lengths), slots.shape[1])
    return torch.segment_reduce(slots, "sum", lengths=lengths, axis=0, unsafe=True, initial=0)


class _SomeToExperts(torch.autograd.Function):
    """Copies tokens (N, width) to slots (S, width), sorted by expert.

    Args:
        x: (N, width).
        order: (S,) flat index of each slot, sorted by expert.
        places: (S,) position in `order` of each slot in the order of tokens.
        lengths: (N,) number of slots of each token.
        top_k: number of slots of a token before any was dropped.
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
    """Multiplies rows (S, width), sorted by expert, by their weights and sums them by token: (N, width).

    Args:
        rows: (S, width); further rows are not read.
        weights: (N, top_k) combine weights.
        order: as in `_SomeToExperts`.
        slots: (S,) flat index of each slot in the order of tokens.
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
