"""Multi-head latent attention (DeepSeek-V2, 2024)."""

from math import sqrt
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forge_core.protocols.model import AttentionCore
from forge_core.specs import Dim, ModuleSpec, TensorSpec
from forge_models.blocks.attention import HEADS, STREAM, LocalAttention
from forge_models.blocks.cache import LayerCache
from forge_models.blocks.layers import Linear, linear_specs
from forge_models.blocks.rope import Rotary, Rotation, magnitude, rotate
from forge_models.inner_values import tap
from forge_models.shape import AttentionKernel, BlockContext

LATENT: tuple[Dim, ...] = ("batch", "sequence", None)


class LatentAttention(nn.Module):
    """Attention with one latent c and one rotary key r per token, shared by all heads; head h has k = [K_h c, r] and v = V_h c.

    Rotation is half-split, as in `rope`; weights of models that rotate neighboring pairs need their rows permuted. If this layer
    does not rotate, r is a key without a position.
    """

    treats_blocks_alike: ClassVar[bool] = True

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
        rotates: bool = True,
        core: AttentionKernel = "auto",
    ) -> None:
        super().__init__()
        self.context = context
        self.kv_lora_rank, self.v_head_dim = kv_lora_rank, v_head_dim
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        self.rotates = rotates
        self.window: int | None = None
        self.rotary = Rotary(qk_rope_head_dim, context.rope)
        width = qk_nope_head_dim + qk_rope_head_dim
        self.core: AttentionCore = LocalAttention(core, width=width if width == v_head_dim else None)
        self.scale = 1 / sqrt(width)
        if rotates and context.rope.scaling == "yarn" and context.rope.mscale_all_dim:
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
        q, k, v = self.projected(x, self.query_latent(x), rotation, cache)
        return self.joined(self.core(q, k, v, attention_mask, self.scale))

    def query_latent(self, x: Tensor) -> Tensor:
        """Returns what queries are computed from: the latent (B, T, q_lora_rank), or (B, T, dim) `x` itself without one."""
        return x if self.q_a_proj is None or self.q_a_norm is None else self.q_a_norm(self.q_a_proj(x))

    def projected(
        self, x: Tensor, queries: Tensor, rotation: Rotation, cache: LayerCache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rotated q and k (B, heads, T or S, qk_nope_head_dim + qk_rope_head_dim), and v (B, heads, S, v_head_dim); S are
        all tokens of the cache. `queries` is the result of `query_latent`."""
        project = self.q_proj if self.q_b_proj is None else self.q_b_proj
        assert project is not None
        q = project(queries).unflatten(-1, (-1, self.qk_nope_head_dim + self.qk_rope_head_dim)).transpose(1, 2)
        q_still, q_turning = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        latent, key = self.kv_a_proj(x).split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        latent, key = tap("attention.latent", self.kv_a_norm(latent)).unsqueeze(1), key.unsqueeze(1)
        if self.rotates:
            key, q_turning = rotate(key, rotation), rotate(q_turning, rotation)
        if cache is not None:
            key, latent = cache.update(key, latent)
        made = self.kv_b_proj(latent.squeeze(1)).unflatten(-1, (-1, self.qk_nope_head_dim + self.v_head_dim))
        k_still, v = made.transpose(1, 2).split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        q = tap("attention.q", torch.cat((q_still, q_turning), dim=-1))
        k = tap("attention.k", torch.cat((k_still, key.expand(-1, k_still.shape[1], -1, -1)), dim=-1))
        return q, k, tap("attention.v", v)

    def joined(self, out: Tensor) -> Tensor:
        """Projects the outputs of all heads, (B, heads, T, v_head_dim) -> (B, T, dim)."""
        return self.o_proj(tap("attention.heads", out).transpose(1, 2).flatten(2))

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
