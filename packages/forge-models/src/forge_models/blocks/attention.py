"""Attention of a block: grouped-query attention, and multi-head latent attention (DeepSeek-V2, 2024)."""

from math import sqrt
from typing import Any, Literal

import torch
from torch import Tensor, nn

from forge_core.protocols.model import AttentionCore
from forge_core.specs import Dim, ModuleSpec, TensorSpec
from forge_models.blocks.attention_core import LocalAttention
from forge_models.blocks.cache import LayerCache
from forge_models.blocks.layers import Linear, linear_specs
from forge_models.blocks.rope import Rotary, Rotation, magnitude, rotate
from forge_models.inner_values import tap
from forge_models.shape import AttentionKernel, BlockContext

STREAM: tuple[Dim, ...] = ("batch", "sequence", "embed")
HEADS: tuple[Dim, ...] = ("batch", "sequence", "heads")
KV_HEADS: tuple[Dim, ...] = ("batch", "sequence", "kv_heads")


class Attention(nn.Module):
    """softmax(q k^T * scale) v with rotary positions; each key-value head serves heads / kv_heads query heads.

    Parallel strategies replace `core`. `window` is the number of positions that one position attends to (None = all), `rotary`
    the position embedding of this layer.
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
        """(B, T, dim) -> (B, T, dim). `attention_mask` is the mask that the core prepared for this batch."""
        q = self._normed(tap("attention.q_projected", self._heads(self.q_proj(x))), self.q_norm)
        k = self._normed(tap("attention.k_projected", self._heads(self.k_proj(x))), self.k_norm)
        v = tap("attention.v", self._heads(self.v_proj(x)))
        return self.o_proj(self.attend(q, k, v, rotation, attention_mask, cache))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, attention_mask: Any, cache: LayerCache | None
    ) -> Tensor:
        """Rotates q, k and attends: q, k, v (B, heads, T, head_dim) -> (B, T, heads * head_dim)."""
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
        # The number of heads is inferred, because a strategy may have split the projections.
        return x.unflatten(-1, (-1, self.context.head_dim)).transpose(1, 2)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs of the parameters, by name relative to this module, without those of its norms."""
        enter = self.context.init_std
        return {
            **linear_specs("q_proj", self.q_proj, ("heads", "embed"), enter),
            **linear_specs("k_proj", self.k_proj, ("kv_heads", "embed"), enter),
            **linear_specs("v_proj", self.v_proj, ("kv_heads", "embed"), enter),
            **linear_specs("o_proj", self.o_proj, ("embed", "heads"), self.context.output_std),
        }

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the modules whose inputs or outputs a strategy may shard, by name relative to this module."""
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


LATENT: tuple[Dim, ...] = ("batch", "sequence", None)


class LatentAttention(nn.Module):
    """Attention with one latent c and one rotary key r per token, shared by all heads; head h has k = [K_h c, r] and v = V_h c.

    Rotation is half-split, as in `rope`; weights of models that rotate neighboring pairs need their rows permuted.
    """

    def __init__(
        self,
        context: BlockContext,
        *,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        norm: Any,
        core: AttentionKernel = "auto",
    ) -> None:
        super().__init__()
        self.context = context
        self.kv_lora_rank, self.v_head_dim = kv_lora_rank, v_head_dim
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        self.window: int | None = None
        self.rotary = Rotary(qk_rope_head_dim, context.rope)
        width = qk_nope_head_dim + qk_rope_head_dim
        self.core: AttentionCore = LocalAttention(core, width=width if width == v_head_dim else None)
        self.scale = 1 / sqrt(width)
        if context.rope.scaling == "yarn" and context.rope.mscale_all_dim:
            self.scale *= magnitude(context.rope, context.rope.mscale_all_dim) ** 2
        rank = q_lora_rank
        self.q_proj = Linear(context.dim, context.heads * width) if rank is None else None
        self.q_a_proj = None if rank is None else Linear(context.dim, rank)
        self.q_a_norm: nn.Module | None = None if rank is None else norm.build(rank)
        self.q_b_proj = None if rank is None else Linear(rank, context.heads * width)
        self.kv_a_proj = Linear(context.dim, kv_lora_rank + qk_rope_head_dim)
        self.kv_a_norm: nn.Module = norm.build(kv_lora_rank)
        self.kv_b_proj = Linear(kv_lora_rank, context.heads * (qk_nope_head_dim + v_head_dim))
        self.o_proj = Linear(context.heads * v_head_dim, context.dim)

    def forward(self, x: Tensor, rotation: Rotation, attention_mask: Any, cache: LayerCache | None = None) -> Tensor:
        """(B, T, dim) -> (B, T, dim). `attention_mask` is the mask that the core prepared for this batch."""
        q = self._queries(x).unflatten(-1, (-1, self.qk_nope_head_dim + self.qk_rope_head_dim)).transpose(1, 2)
        q_still, q_turning = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        latent, key = self.kv_a_proj(x).split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        latent, key = tap("attention.latent", self.kv_a_norm(latent)).unsqueeze(1), rotate(key.unsqueeze(1), rotation)
        if cache is not None:
            key, latent = cache.update(key, latent)
        made = self.kv_b_proj(latent.squeeze(1)).unflatten(-1, (-1, self.qk_nope_head_dim + self.v_head_dim))
        k_still, v = made.transpose(1, 2).split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        q = tap("attention.q", torch.cat((q_still, rotate(q_turning, rotation)), dim=-1))
        k = tap("attention.k", torch.cat((k_still, key.expand(-1, k_still.shape[1], -1, -1)), dim=-1))
        out = self.core(q, k, tap("attention.v", v), attention_mask, self.scale)
        return self.o_proj(tap("attention.heads", out).transpose(1, 2).flatten(2))

    def _queries(self, x: Tensor) -> Tensor:
        if self.q_a_proj is not None and self.q_a_norm is not None and self.q_b_proj is not None:
            return self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
        assert self.q_proj is not None
        return self.q_proj(x)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs of the parameters, by name relative to this module, without those of its norms."""
        enter = self.context.init_std
        specs = {
            **linear_specs("kv_a_proj", self.kv_a_proj, (None, "embed"), enter),
            **linear_specs("kv_b_proj", self.kv_b_proj, ("heads", None), enter),
            **linear_specs("o_proj", self.o_proj, ("embed", "heads"), self.context.output_std),
        }
        if self.q_a_proj is not None and self.q_b_proj is not None:
            specs |= linear_specs("q_a_proj", self.q_a_proj, (None, "embed"), enter)
            specs |= linear_specs("q_b_proj", self.q_b_proj, ("heads", None), enter)
        if self.q_proj is not None:
            specs |= linear_specs("q_proj", self.q_proj, ("heads", "embed"), enter)
        return specs

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the modules whose inputs or outputs a strategy may shard, by name relative to this module."""
        specs = {
            "": ModuleSpec((STREAM,), (STREAM,)),
            "kv_a_proj": ModuleSpec((STREAM,), (LATENT,)),
            "kv_b_proj": ModuleSpec((LATENT,), (HEADS,)),
            "o_proj": ModuleSpec((HEADS,), (STREAM,)),
        }
        if self.q_proj is not None:
            return specs | {"q_proj": ModuleSpec((STREAM,), (HEADS,))}
        return specs | {"q_a_proj": ModuleSpec((STREAM,), (LATENT,)), "q_b_proj": ModuleSpec((LATENT,), (HEADS,))}
