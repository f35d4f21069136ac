"""Causal attention: projections here, the softmax part in a core that strategies replace."""

from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.protocols.model import AttentionCore
from forge_core.specs import Dim, Init, ModuleSpec, TensorSpec
from forge_models.blocks.layers import Linear
from forge_models.blocks.rope import Rotation, rotate
from forge_models.cache import LayerCache
from forge_models.context import BlockContext
from forge_models.interp.tap import tap


class LocalAttention:
    """The core of one process: `torch.nn.functional.scaled_dot_product_attention`, which keeps its softmax in fp32."""

    def prepare(self, documents: Tensor | None, length: int, window: int | None, device: Any) -> Tensor | None:
        """Boolean mask (B, 1, T, T) or (1, 1, T, T), True = visible; None = causal over the whole row, the fast path."""
        if documents is None and (window is None or window >= length):
            return None
        places = torch.arange(length, device=device)
        distance = places[:, None] - places[None, :]
        visible = distance >= 0
        if window is not None:
            visible = visible & (distance < window)
        if documents is None:
            return visible[None, None]
        return (visible & (documents[:, :, None] == documents[:, None, :])).unsqueeze(1)

    def prepare_cached(self, slots: Tensor, extent: int, window: int | None) -> Tensor:
        """Boolean mask (B, 1, T, extent) of queries at `slots` (B, T) over the first `extent` slots of a cache."""
        distance = slots[:, :, None] - torch.arange(extent, device=slots.device)
        visible = distance >= 0
        if window is not None:
            visible = visible & (distance < window)
        return visible.unsqueeze(1)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, shared: Any, scale: float) -> Tensor:
        """q (B, heads, T, head_dim), k and v (B, kv_heads, S, head_dim) -> (B, heads, T, head_dim)."""
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=shared, is_causal=shared is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )


class Attention(nn.Module):
    """softmax(q k^T / sqrt(head_dim)) v with rotary positions; each key-value head serves heads / kv_heads query heads.

    `core` is the seam where strategies enter, `window` the number of positions that one position sees (None = all).
    """

    def __init__(self, context: BlockContext, qk_norm: bool = False) -> None:
        super().__init__()
        self.context = context
        self.core: AttentionCore = LocalAttention()
        self.window: int | None = None
        self.scale = 1 / sqrt(context.head_dim)
        self.q_proj = Linear(context.dim, context.heads * context.head_dim)
        self.k_proj = Linear(context.dim, context.kv_heads * context.head_dim)
        self.v_proj = Linear(context.dim, context.kv_heads * context.head_dim)
        self.o_proj = Linear(context.heads * context.head_dim, context.dim)
        norm: Any = context.norm
        self.q_norm: nn.Module | None = norm.build(context.head_dim) if qk_norm else None
        self.k_norm: nn.Module | None = norm.build(context.head_dim) if qk_norm else None

    def forward(self, x: Tensor, turn: Rotation, shared: Any, cache: LayerCache | None = None) -> Tensor:
        """(B, T, dim) -> (B, T, dim). `shared` is what the core prepared for this batch."""
        q, k, v = (self._heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = tap("attention.q", rotate(q, turn)), tap("attention.k", rotate(k, turn))
        if cache is not None:
            k, v = cache.update(k, v)
        out = self.core(q, k, v, shared, self.scale)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        # The number of heads is left open: a strategy may have split the projections.
        return x.unflatten(-1, (-1, self.context.head_dim)).transpose(1, 2)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Parameters by name relative to this module, without those of its norms."""
        enter = Init("normal", self.context.init_std)
        return {
            "q_proj.weight": TensorSpec(("heads", "embed"), enter, "matrix"),
            "k_proj.weight": TensorSpec(("kv_heads", "embed"), enter, "matrix"),
            "v_proj.weight": TensorSpec(("kv_heads", "embed"), enter, "matrix"),
            "o_proj.weight": TensorSpec(("embed", "heads"), Init("normal", self.context.output_std), "matrix"),
        }

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Modules whose inputs or outputs a strategy may lay out, by name relative to this module."""
        stream: tuple[Dim, ...] = ("batch", "sequence", "embed")
        heads: tuple[Dim, ...] = ("batch", "sequence", "heads")
        kv_heads: tuple[Dim, ...] = ("batch", "sequence", "kv_heads")
        return {
            "": ModuleSpec((stream,), (stream,)),
            "q_proj": ModuleSpec((stream,), (heads,)),
            "k_proj": ModuleSpec((stream,), (kv_heads,)),
            "v_proj": ModuleSpec((stream,), (kv_heads,)),
            "o_proj": ModuleSpec((heads,), (stream,)),
        }
