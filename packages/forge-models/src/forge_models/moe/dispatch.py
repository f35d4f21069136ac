"""Brings tokens to their experts inside one process."""

from collections.abc import Callable

import torch
from torch import Tensor


class LocalDispatch:
    """The dispatcher of one process: sort by expert, run every expert on its tokens, put the results back."""

    def __call__(
        self, x: Tensor, experts: Tensor, weights: Tensor, run: Callable[[Tensor, Tensor], Tensor], count: int
    ) -> Tensor:
        """Weighted sum of the chosen experts' outputs (N, embed), in the dtype of `x`; the same bits on every call.

        Args:
            x: (N, embed) tokens.
            experts: (N, top_k) int64 expert of each slot; -1 = dropped, it adds nothing.
            weights: (N, top_k) combine weights.
            run: (tokens sorted by expert, tokens per expert (count,) int64) -> outputs in the same order.
            count: number of experts in the layer.
        """
        tokens, top_k = experts.shape
        flat = experts.flatten()
        kept = (flat >= 0).nonzero().squeeze(1)
        slots = kept[flat[kept].argsort(stable=True)]
        outputs = run(x[slots // top_k], torch.bincount(flat[kept], minlength=count))
        weighted = outputs * weights.flatten()[slots].unsqueeze(1)
        # Each slot has its own row, so the sum over a token's experts has one order; an index_add would not on a GPU.
        by_slot = weighted.new_zeros(tokens * top_k, weighted.shape[1]).index_copy(0, slots, weighted)
        return by_slot.unflatten(0, (tokens, top_k)).sum(1).to(x.dtype)
