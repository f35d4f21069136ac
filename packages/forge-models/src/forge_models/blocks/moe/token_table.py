"""A router whose experts are those of the token's id in a fixed table (DeepSeek-V4, 2026; after Roller et al., 2021).

The weights of the experts are their scores of the hidden state, so the router's matrix is trained although the choice is not.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from forge_core.specs import Init, TensorSpec
from forge_models.blocks.layers import unfilled
from forge_models.blocks.moe.routers import Routing, by_score, logits_of, score, weight_spec
from forge_models.shape import RouterContext, RouterScores


class TokenTable(nn.Module):
    """See `hash_layers` of `forge_models.components.experts.SigmoidTopKConfig`. Row t of the buffer `table` (vocab_size, top_k)
    int64 has the experts of token id t, all different."""

    table: Tensor

    treats_blocks_alike: ClassVar[bool] = True
    chooses: ClassVar[bool] = False
    """Losses cannot balance the choice of experts."""

    def __init__(
        self, context: RouterContext, *, scores: RouterScores = "sigmoid", normalize: bool = True, scaling: float = 1.0
    ) -> None:
        """
        Raises:
            ValueError: the block processes no tokens.
        """
        super().__init__()
        if not context.vocab_size:
            raise ValueError("router.hash_layers need token ids, but this block processes none; remove hash_layers")
        self.context, self.normalize, self.scaling = context, normalize, scaling
        self.scores: RouterScores = scores
        self.weight = unfilled(context.experts, context.dim)
        self.register_buffer("table", torch.full((context.vocab_size, context.top_k), -1))

    def forward(self, x: Tensor, tokens: Tensor | None) -> Routing:
        """See `forge_models.blocks.moe.routers.Router`.

        Raises:
            ValueError: `tokens` is None.
        """
        if tokens is None:
            raise ValueError(
                "a table of experts needs token ids; pass `tokens` to a pipeline stage that starts from hidden states"
            )
        logits = logits_of(x, self.weight)
        return by_score(logits, score(self.scores, logits), self.table[tokens], self.normalize, self.scaling)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs of the weight and the table."""
        table = TensorSpec((None, None), Init("choices", choices=self.context.experts), "vector")
        return {"weight": weight_spec(self.context), "table": table}
