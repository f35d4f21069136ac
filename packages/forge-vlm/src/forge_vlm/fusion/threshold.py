"""Threshold routing: a token is with every expert that scores it above the expert's threshold, which follows the scores."""

from typing import Any

import torch
from torch import Tensor

from forge_core.specs import Init, TensorSpec
from forge_models.shape import BlockContext, MoEShape
from forge_vlm.fusion.scored import ScoredExperts

BINS = 512
"""Of the histogram of scores, between 0 and 1."""


class Threshold(ScoredExperts):
    """The threshold is a running mean of the score that 1 / experts of a step's tokens exceed, so that an expert has its even
    share on average (Expert Threshold routing, 2026). Who is with whom depends on the token alone, in training as in evaluation.

    Scores of a step are counted in `BINS` bins over all ranks, so every layout and every micro-batch gives the same threshold.
    """

    threshold: Tensor

    def __init__(self, shape: MoEShape, mlp: Any, context: BlockContext, *, rate: float = 0.05) -> None:
        super().__init__(shape, mlp, context)
        self.rate = rate
        self.register_buffer("threshold", torch.full((shape.experts,), torch.nan))

    def choose(self, x: Tensor, logits: Tensor, sequences: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """See `ScoredExperts`. The buffer holds the threshold less 1/2, where scores of an untrained router lie."""
        del x, sequences
        chosen = logits.detach().sigmoid() > self.threshold + 0.5
        return chosen, None, None

    def counted(self, logits: Tensor, token_mask: Tensor | None) -> list[Tensor]:
        """The histogram of each expert's scores."""
        bins = (logits.sigmoid() * BINS).long().clamp(max=BINS - 1)
        ones = torch.ones_like(bins, dtype=torch.float64)
        if token_mask is not None:
            ones = ones * token_mask.flatten().unsqueeze(1)
        counts = torch.zeros(BINS, bins.shape[1], dtype=torch.float64, device=bins.device).scatter_add_(0, bins, ones)
        return [counts.flatten()]

    def width(self) -> int:
        """See `ScoredExperts`."""
        return super().width() + BINS * self.shape.experts

    @torch.no_grad()
    def after_step(self, totals: Tensor, skip: Tensor) -> None:
        """See `Observer`."""
        super().after_step(totals, skip)
        counts = totals[super().width() :].view(BINS, -1)
        upper = quantile(counts, 1 - 1 / self.shape.experts).to(self.threshold.dtype) - 0.5
        moved = self.threshold + self.rate * (upper - self.threshold)
        still = (skip > 0) | (counts.sum(0) == 0)
        self.threshold.copy_(torch.where(still, self.threshold, moved))

    def _apply(self, fn: Any, recurse: bool = True) -> "Threshold":
        """Keeps the threshold at fp32 or more where parameters become bf16: small moves would be lost in it."""
        kept = self.threshold
        super()._apply(fn, recurse)
        if torch.finfo(self.threshold.dtype).bits < torch.finfo(kept.dtype).bits:
            self.threshold = kept.to(self.threshold.device, torch.promote_types(self.threshold.dtype, torch.float32))
        return self

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """The matrix of scores and the threshold."""
        return super().tensor_specs() | {"threshold": TensorSpec((None,), Init("zeros"), "vector")}


def quantile(counts: Tensor, share: float) -> Tensor:
    """(experts,) fp64: the value below which `share` of the values in [0, 1] lie, from (bins, experts) counts in equal bins;
    values are taken to be spread evenly inside a bin."""
    bins = len(counts)
    total = counts.cumsum(0)
    wanted = share * total[-1]
    place = (total < wanted).sum(0).clamp(max=bins - 1)
    at = place.unsqueeze(0)
    before = total.gather(0, at)[0] - counts.gather(0, at)[0]
    inside = ((wanted - before) / counts.gather(0, at)[0].clamp(min=1)).clamp(0, 1)
    return (place + inside) / bins
