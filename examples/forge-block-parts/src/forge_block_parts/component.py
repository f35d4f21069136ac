"""The keys of the four parts."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Gt

from forge_core import IDENTITY, Component


@dataclass(frozen=True, kw_only=True)
class SigmoidAttentionConfig(Component):
    """Attention with sigmoid(score - log n) instead of a softmax, for n visible tokens (Ramapuram et al., 2024)."""

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_block_parts.attention:SigmoidAttention"


@dataclass(frozen=True, kw_only=True)
class ReGLU(Component):
    """Feed-forward layer down(relu(gate(x)) * up(x)), three matrices (Shazeer, 2020)."""

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_block_parts.layers:ReGLULayer"
    gated: ClassVar[bool] = True  # what experts of a decoder with this layer are made of, with `activation`
    activation: ClassVar[str] = "relu"


@dataclass(frozen=True, kw_only=True)
class DyTConfig(Component):
    """weight * tanh(scale * x) + bias in place of a norm, without statistics (Zhu et al., 2025)."""

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_block_parts.layers:DyT"


@dataclass(frozen=True, kw_only=True)
class CosineConfig(Component):
    """Takes the top_k of softmax(cosine(x, expert) / temperature) (XMoE, Chi et al., 2022). Weights of a token sum to 1."""

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_block_parts.layers:CosineRouter"
    total: ClassVar[float] = 1.0

    temperature: Annotated[float, Gt(0)] = 0.1
    """Divides the cosines; a lower temperature makes the choice sharper."""
