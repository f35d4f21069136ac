"""Brings tokens to their experts inside one process. Nothing here waits for the device."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge_models.moe.ragged import _SomeToExperts, _SomeToTokens


class LocalDispatch:
    """The dispatcher of one process: sort by expert, run every expert on its tokens, put the results back."""

    def __call__(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        run: Callable[[Tensor, Tensor], Tensor],
        count: int,
        slots: int | None = None,
        overlap_with: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """Weighted sum of the chosen experts' outputs, (N, embed) in the dtype of `x`; the same bits on every call.

        Args:
            x: (N, embed) tokens.
            experts: (N, top_k) int64 expert of each slot; -1 = dropped, it adds nothing.
            weights: (N, top_k) combine weights, in which the sum is made.
            run: (tokens sorted by expert, tokens per expert (count,) int64) -> outputs in the same order. Rows beyond the
                last expert's are those of dropped slots: their outputs are not read.
            count: number of experts in the layer.
            slots: how many slots are not dropped, where the host knows it: no row is made for others then.
            overlap_with: makes (N, embed) that is added.
        """
        whole = slots == experts.numel()
        flat = experts.flatten()
        keys, order = (flat if whole else flat.where(flat >= 0, count)).sort(stable=True)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        counts = torch.searchsorted(keys, torch.arange(count + 1, device=keys.device)).diff()
        if whole or slots is None:
            kept, at = None if whole else experts >= 0, places.view_as(experts)
            rows = _ToExperts.apply(x, order, at, kept)
            y = _ToTokens.apply(run(rows, counts), weights, at, kept)
        else:
            order, lengths = order[:slots], (experts >= 0).sum(1)
            by_token = torch.nonzero_static(flat >= 0, size=slots).squeeze(1)
            at = places[by_token]
            rows = _SomeToExperts.apply(x, order, at, lengths, experts.shape[1])
            y = _SomeToTokens.apply(run(rows, counts), weights, order, by_token, at, lengths)
        return y if overlap_with is None else y + overlap_with()


def _rows(source: Tensor, places: Tensor, kept: Tensor | None) -> Tensor:
    """(N, width): row places[t] of `source` for every token t, zero where its slot was dropped."""
    rows = source.index_select(0, places)  # in eager mode on a CPU several times as fast as source[places]
    # Not a product with a mask: rows of dropped slots may hold NaN.
    return rows if kept is None else rows.masked_fill_(~kept.unsqueeze(1), 0)


def _slots(places: Tensor, kept: Tensor | None) -> list[tuple[Tensor, Tensor | None]]:
    masks = [None] * places.shape[1] if kept is None else list(kept.unbind(1))
    return list(zip(places.unbind(1), masks, strict=True))


class _ToExperts(torch.autograd.Function):
    """x[order // top_k]. Its backward sums the slots of a token in their order; an index_add would not, on a GPU."""

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
    """Sum over a token's slots of weight * row. Keeps the rows and the weights, and no copy per slot."""

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
        # Slot after slot: products of all slots at once, in the precision of the weights, would not stay in the cache.
        by_row, by_weight = torch.empty_like(rows), []
        for (at, mask), weight in zip(_slots(places, kept), weights.unbind(1), strict=True):
            by_row.index_copy_(0, at, (grad * weight.unsqueeze(1)).to(rows.dtype))
            by_weight.append((_rows(rows, at, mask) * grad).sum(1, dtype=weights.dtype))
        return by_row, torch.stack(by_weight, 1), None, None
