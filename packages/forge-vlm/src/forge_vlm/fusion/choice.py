"""Expert choice: in training each expert takes the tokens that it scores highest (Zhou et al., 2022; MoMa, 2024, 2.2)."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from forge_core.specs import Init, TensorSpec
from forge_models.blocks.layers import unfilled
from forge_models.shape import BlockContext, MoEShape
from forge_vlm.fusion.scored import ScoredExperts

STEPS = 4096
"""Scores are compared in steps of 1 / STEPS: of two tokens that are alike, such as the first two of a sequence where they are the
same word, the earlier one is taken, and not the one that rounding favors in this layout."""


def highest(scores: Tensor, sequences: Tensor) -> Tensor:
    """(n, experts) bool: of a sequence's s tokens, each expert takes the ceil(s / experts) of the highest scores, the earlier one
    among equals. Sequences never compete with each other.

    Args:
        scores: (n, experts).
        sequences: (n,) int64, ascending.
    """
    tokens, count = scores.shape
    by_score = (scores * STEPS).round().argsort(dim=0, descending=True, stable=True)
    order = by_score.gather(0, sequences[by_score].argsort(dim=0, stable=True))
    # Sorted by sequence, place p is of the sequence that token p has.
    first = torch.searchsorted(sequences, sequences)
    size = torch.searchsorted(sequences, sequences, right=True) - first
    rank = torch.arange(tokens, device=scores.device) - first
    taken = rank < -(-size // count)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(0, order, taken.unsqueeze(1).expand_as(order))


class ExpertChoice(ScoredExperts):
    """Which tokens an expert takes depends on those behind them: not what a model can do that writes one token after the other.
    So a second router, of the token alone, learns to foresee the choice, and makes it in evaluation. It reads detached inputs,
    and changes nothing that the model learns.
    """

    def __init__(self, shape: MoEShape, mlp: Any, context: BlockContext) -> None:
        super().__init__(shape, mlp, context)
        self.foresight = unfilled(shape.experts, context.dim)
        self.foresight_bias = unfilled(shape.experts)

    def choose(self, x: Tensor, logits: Tensor, sequences: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """See `ScoredExperts`; the loss is the cross-entropy of each foreseen decision."""
        foreseen = F.linear(x.detach().to(logits.dtype), self.foresight.to(logits.dtype), self.foresight_bias.to(logits.dtype))
        if not self.training:
            return foreseen > 0, None, None
        chosen = highest(logits.detach(), sequences)
        loss = F.binary_cross_entropy_with_logits(foreseen, chosen.to(foreseen.dtype), reduction="none")
        return chosen, loss, foreseen > 0

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """The matrices of scores and of foresight."""
        foresight = TensorSpec((None, "embed"), Init("normal", self.context.init_std), "router")
        return {**super().tensor_specs(), "foresight": foresight, "foresight_bias": TensorSpec((None,), Init("zeros"), "vector")}
