"""Causal attention: projections here, the softmax part in a core that strategies replace."""

from math import sqrt
from typing import Any, Literal

from torch import Tensor, nn

from forge_core.protocols.model import AttentionCore
from forge_core.specs import Dim, ModuleSpec, TensorSpec
from forge_models.blocks.attention_core import LocalAttention
from forge_models.blocks.layers import Linear, linear_specs
from forge_models.blocks.rope import Rotary, Rotation, rotate
from forge_models.context import BlockContext
from forge_models.generation.cache import LayerCache
from forge_models.interp.tap import tap
from forge_models.kernels import AttentionKernel

STREAM: tuple[Dim, ...] = ("batch", "sequence", "embed")
HEADS: tuple[Dim, ...] = ("batch", "sequence", "heads")
KV_HEADS: tuple[Dim, ...] = ("batch", "sequence", "kv_heads")


class Attention(nn.Module):
    """softmax(q k^T * scale) v with rotary positions; each key-value head serves heads / kv_heads query heads.

    `core` is the seam where strategies enter, `window` the number of positions that one position sees (None = all),
    `rotary` the positions of this layer.
    """

    def __init__(
        self,
        context: BlockContext,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm: Literal["none", "head", "full"] = "none",
        scale: float | None = None,
        soft_cap: float | None = None,
        window: int | None = None,
        core: AttentionKernel = "auto",
    ) -> None:
        super().__init__()
        self.context = context
        self.qk_norm = qk_norm
        self.soft_cap = soft_cap
        self.core: AttentionCore = LocalAttention(core, capped=soft_cap is not None, width=context.head_dim)
        self.window = window
        self.rotary = Rotary(int(context.head_dim * context.rope.partial), context.rope.of_layer(window is not None))
        self.scale = scale or 1 / sqrt(context.head_dim)
        heads, kv_heads = context.heads * context.head_dim, context.kv_heads * context.head_dim
        self.q_proj = Linear(context.dim, heads, qkv_bias)
        self.k_proj = Linear(context.dim, kv_heads, qkv_bias)
        self.v_proj = Linear(context.dim, kv_heads, qkv_bias)
        self.o_proj = Linear(heads, context.dim, output_bias)
        norm: Any = context.norm
        widths = {"none": None, "head": (context.head_dim, context.head_dim), "full": (heads, kv_heads)}[qk_norm]
        self.q_norm: nn.Module | None = norm.build(widths[0]) if widths else None
        self.k_norm: nn.Module | None = norm.build(widths[1]) if widths else None

    def forward(self, x: Tensor, rotation: Rotation, attention_mask: Any, cache: LayerCache | None = None) -> Tensor:
        """(B, T, dim) -> (B, T, dim). `attention_mask` is what the core prepared for this batch."""
        q = self._normed(tap("attention.q_projected", self._heads(self.q_proj(x))), self.q_norm)
        k = self._normed(tap("attention.k_projected", self._heads(self.k_proj(x))), self.k_norm)
        v = tap("attention.v", self._heads(self.v_proj(x)))
        return self.o_proj(self.attend(q, k, v, rotation, attention_mask, cache))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, attention_mask: Any, cache: LayerCache | None
    ) -> Tensor:
        """(B, heads, T, head_dim) each, before positions -> (B, T, heads * head_dim)."""
        q, k = tap("attention.q", rotate(q, rotation)), tap("attention.k", rotate(k, rotation))
        if cache is not None:
            k, v = cache.update(k, v)
        cap = self.soft_cap
        out = (
            self.core(q, k, v, attention_mask, self.scale) if cap is None else self.core(q, k, v, attention_mask, self.scale, cap)
        )
        return tap("attention.heads", out).transpose(1, 2).flatten(2)

    def _normed(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        if norm is None:
            return x
        return self._heads(norm(x.transpose(1, 2).flatten(2))) if self.qk_norm == "full" else norm(x)

    def _heads(self, x: Tensor) -> Tensor:
        # The number of heads is left open: a strategy may have split the projections.
        return x.unflatten(-1, (-1, self.context.head_dim)).transpose(1, 2)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Parameters by name relative to this module, without those of its norms."""
        enter = self.context.init_std
        return {
            **linear_specs("q_proj", self.q_proj, ("heads", "embed"), enter),
            **linear_specs("k_proj", self.k_proj, ("kv_heads", "embed"), enter),
            **linear_specs("v_proj", self.v_proj, ("kv_heads", "embed"), enter),
            **linear_specs("o_proj", self.o_proj, ("embed", "heads"), self.context.output_std),
        }

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Modules whose inputs or outputs a strategy may lay out, by name relative to this module."""
        specs = {
            "": ModuleSpec((STREAM,), (STREAM,)),
            "q_proj": ModuleSpec((STREAM,), (HEADS,)),
            "k_proj": ModuleSpec((STREAM,), (KV_HEADS,)),
            "v_proj": ModuleSpec((STREAM,), (KV_HEADS,)),
            "o_proj": ModuleSpec((HEADS,), (STREAM,)),
        }
        if self.qk_norm == "full":
            specs |= {"q_norm": ModuleSpec((HEADS,), (HEADS,)), "k_norm": ModuleSpec((KV_HEADS,), (KV_HEADS,))}
        return specs
