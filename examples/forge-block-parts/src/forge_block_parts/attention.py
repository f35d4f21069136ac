"""Sigmoid attention. Scores are computed in fp32, and all of them exist: this is for short rows."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forge_core import TensorSpec
from forge_models import BlockContext
from forge_models.blocks import Linear, LocalAttention, Rotary, Rotation, linear_specs, rotate


class SigmoidAttention(nn.Module):
    """Each key-value head serves heads / kv_heads query heads."""

    treats_blocks_alike: ClassVar[bool] = True

    def __init__(self, context: BlockContext) -> None:
        super().__init__()
        self.context = context
        self.core = LocalAttention("sdpa")  # the decoder lets it prepare the mask of documents
        self.rotary = Rotary(context.head_dim, context.rope)
        heads, kv_heads = context.heads * context.head_dim, context.kv_heads * context.head_dim
        self.q_proj, self.o_proj = Linear(context.dim, heads), Linear(heads, context.dim)
        self.k_proj, self.v_proj = Linear(context.dim, kv_heads), Linear(context.dim, kv_heads)

    def forward(self, x: Tensor, rotation: Rotation, attention_mask: Tensor | None, cache: Any = None) -> Tensor:
        """(B, T, dim) -> (B, T, dim); `attention_mask` (B or 1, 1, T, T) bool, or None for causal rows."""
        if cache is not None:
            raise ValueError("sigmoid attention has no cache for generation; choose attention 'gqa' for models that generate")
        width, groups = self.context.head_dim, self.context.heads // self.context.kv_heads
        q, k, v = (layer(x).unflatten(-1, (-1, width)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        k, v = (part.repeat_interleave(groups, 1) for part in (rotate(k, rotation), v))
        scores = (rotate(q, rotation) @ k.transpose(-1, -2)) * width**-0.5
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        seen = (
            torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).tril() if attention_mask is None else attention_mask
        )
        weights = (scores - seen.sum(-1, keepdim=True).log()).sigmoid().masked_fill(~seen, 0.0)
        return self.o_proj((weights.to(v.dtype) @ v).transpose(1, 2).flatten(2))

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs of the four matrices."""
        std = self.context.init_std
        return {
            **linear_specs("q_proj", self.q_proj, ("heads", "embed"), std),
            **linear_specs("k_proj", self.k_proj, ("kv_heads", "embed"), std),
            **linear_specs("v_proj", self.v_proj, ("kv_heads", "embed"), std),
            **linear_specs("o_proj", self.o_proj, ("embed", "heads"), self.context.output_std),
        }
