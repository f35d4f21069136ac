"""Parts of a block, chosen inside `[model]`: `attention = { name = "gqa", qk_norm = true }`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt

from forge_core.component import Component
from forge_models.context import BlockContext

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class GQA(Component):
    """Causal attention with rotary positions and grouped key-value heads (Ainslie et al., 2023).

    `kv_heads` of the model decides: equal to `heads` is multi-head, 1 is multi-query attention.
    """

    qk_norm: bool = False
    """Normalise each head of q and k before the rotation, with the model's norm."""

    def build(self, context: BlockContext) -> "nn.Module":
        from forge_models.blocks.attention import Attention

        return Attention(context, qk_norm=self.qk_norm)


@dataclass(frozen=True, kw_only=True)
class SwiGLU(Component):
    """Feed-forward part down(silu(gate(x)) * up(x)), three matrices without bias (Shazeer, 2020)."""

    def build(self, context: BlockContext) -> "nn.Module":
        from forge_models.blocks.mlp import SwiGLU as Module

        return Module(context)


@dataclass(frozen=True, kw_only=True)
class RMSNorm(Component):
    """x / sqrt(mean(x^2) + eps) * weight, with statistics in fp32 (Zhang and Sennrich, 2019)."""

    eps: Annotated[float, Gt(0)] = 1e-5
    """Added to the mean square."""

    def build(self, dim: int) -> "nn.Module":
        from forge_models.blocks.norm import RMSNorm as Module

        return Module(dim, self.eps)
