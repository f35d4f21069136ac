"""The dense decoder, chosen by `[model] name = "decoder"`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt

from forge_core.component import Component, Slot
from forge_models.components.blocks import GQA, RMSNorm, SwiGLU
from forge_models.context import BlockContext

if TYPE_CHECKING:
    from forge_models.decoder import Decoder as Module

FFN_MULTIPLE = 64
"""The feed-forward width that nobody chose is a multiple of this, so that it divides over ranks and tiles."""


@dataclass(frozen=True, kw_only=True)
class Decoder(Component):
    """Pre-norm decoder: embedding, blocks of attention and feed-forward, norm, head (the Llama shape)."""

    dim: Annotated[int, Gt(0)] = 512
    """Width of the residual stream."""
    layers: Annotated[int, Gt(0)] = 8
    """Number of blocks."""
    heads: Annotated[int, Gt(0)] = 8
    """Number of query heads."""
    kv_heads: Annotated[int, Gt(0)] | None = None
    """Number of key and value heads, a divisor of `heads`; follows `heads` when absent."""
    head_dim: Annotated[int, Gt(0)] | None = None
    """Width of one head, even; dim / heads when absent."""
    ffn_dim: Annotated[int, Gt(0)] | None = None
    """Hidden width of the feed-forward part; 8/3 * dim rounded up to a multiple of 64 when absent."""
    vocab_size: Annotated[int, Gt(1)] = 32768
    """Number of token ids."""
    max_length: Annotated[int, Gt(0)] = 2048
    """Longest sequence in tokens."""
    rope_theta: Annotated[float, Gt(0)] = 10000.0
    """Base of the rotary angles."""
    tied_embeddings: bool = False
    """The head uses the embedding's table."""
    soft_cap: Annotated[float, Gt(0)] | None = None
    """Logits become soft_cap * tanh(logits / soft_cap); no cap when absent."""
    init_std: Annotated[float, Gt(0)] = 0.02
    """Standard deviation of hidden matrices at the start; projections back to the stream get it / sqrt(2 * layers)."""
    attention: Annotated[Component, Slot("forge.attentions", default="gqa")] = Slot.unset()
    """Attention of every block."""
    mlp: Annotated[Component, Slot("forge.mlps", default="swiglu")] = Slot.unset()
    """Feed-forward part of every block."""
    norm: Annotated[Component, Slot("forge.norms", default="rmsnorm")] = Slot.unset()
    """Norm before each part of a block and before the head."""

    def __post_init__(self) -> None:
        if self.heads % self.resolved_kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} must divide heads {self.heads}")
        if self.head_dim is None and self.dim % self.heads:
            raise ValueError(f"dim {self.dim} must be a multiple of heads {self.heads}, or head_dim must be given")
        if self.resolved_head_dim % 2:
            source = "head_dim" if self.head_dim is not None else f"dim {self.dim} / heads {self.heads} = head_dim"
            raise ValueError(f"{source} {self.resolved_head_dim} must be even: rotary positions turn pairs")

    @property
    def resolved_kv_heads(self) -> int:
        """`kv_heads`, or `heads` when absent."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def resolved_head_dim(self) -> int:
        """`head_dim`, or dim / heads when absent."""
        return self.dim // self.heads if self.head_dim is None else self.head_dim

    @property
    def resolved_ffn_dim(self) -> int:
        """`ffn_dim`, or 8/3 * dim rounded up to a multiple of 64 when absent: as many weights as a plain 4 * dim MLP."""
        if self.ffn_dim is not None:
            return self.ffn_dim
        return -(-8 * self.dim // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE

    @property
    def resolved_attention(self) -> Component:
        """`attention`, or grouped-query attention when this object was made in Python without one."""
        return GQA() if self.attention is None else self.attention

    @property
    def resolved_mlp(self) -> Component:
        """`mlp`, or SwiGLU when this object was made in Python without one."""
        return SwiGLU() if self.mlp is None else self.mlp

    @property
    def resolved_norm(self) -> Component:
        """`norm`, or RMSNorm when this object was made in Python without one."""
        return RMSNorm() if self.norm is None else self.norm

    def context(self, layer: int) -> BlockContext:
        """What the components of block `layer` are given."""
        return BlockContext(
            dim=self.dim,
            layers=self.layers,
            layer=layer,
            heads=self.heads,
            kv_heads=self.resolved_kv_heads,
            head_dim=self.resolved_head_dim,
            ffn_dim=self.resolved_ffn_dim,
            max_length=self.max_length,
            rope_theta=self.rope_theta,
            init_std=self.init_std,
            norm=self.resolved_norm,
        )

    def build(self) -> "Module":
        from forge_models.decoder import Decoder as Module

        return Module(self)
