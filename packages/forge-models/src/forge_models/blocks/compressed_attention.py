"""Attention to the last tokens and to compressed keys (DeepSeek-V4, 2026, section 2.3).

All heads share one key for each token, which is also its value. Queries come from a latent, and each head of them is divided by
its root mean square. The last dimensions of queries and keys are rotated as pairs of neighbors; as values are rotated too, the
output is rotated back by the position of the query, so that it depends on distances only. Each head has a sink. The heads of a
group share a projection to few numbers, and the output projection reads those of all groups.

A layer sees a window of tokens only, or also compressed keys (`forge_models.blocks.compression`): all earlier ones, or those that
an indexer chooses for each query. The indexer has compressed keys of its own, and learns as `forge_models.blocks.indexer`
describes, from the attention to the compressed keys that it chose.
"""

from math import sqrt
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.specs import Dim, Init, ModuleSpec, TensorSpec
from forge_models.blocks.attention import HEADS, STREAM
from forge_models.blocks.cache import LayerCache
from forge_models.blocks.compression import (
    LOW,
    Compressor,
    Windows,
    cached_windows,
    rotate_pairs,
    rotation_at,
    windows_of,
)
from forge_models.blocks.indexer import HeadSum, LearnsFromAttention, chosen, index_scores
from forge_models.blocks.layers import Linear, linear_specs, unfilled, unit_rms
from forge_models.blocks.rope import Rotary, Rotation
from forge_models.inner_values import tap
from forge_models.shape import BlockContext

ALIGNED = 8
"""Widths of heads are multiples of this number in fused kernels."""


class SharedKeysWithSinks:
    """Attention core whose heads share their keys, with a sink of each head. `rate` is that of compressed keys; None: there are
    none."""

    masked: ClassVar[bool] = True
    """True: `prepare` returns a mask on every device, which a stand-in for the core must return too."""

    def __init__(self, rate: int | None) -> None:
        self.rate = rate

    def prepare(self, documents: Tensor | None, length: int, window: int | None, device: Any) -> Windows:
        """Returns what queries see in whole rows."""
        return windows_of(documents, length, window, self.rate, device)

    def prepare_cached(self, slots: Tensor, extent: int, window: int | None) -> Windows:
        """Returns what queries at `slots` (B, T) see of the first `extent` slots of a cache."""
        return cached_windows(slots, extent, window, self.rate)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, shared: Tensor, scale: float, sinks: Tensor) -> Tensor:
        """q (B, heads, T, width), k and v (B, 1, S, width), shared (B or 1, 1, T, S), sinks (heads,) -> (B, heads, T, width).

        A sink is a key with value 0 in a dimension of its own, so that fused kernels compute it.
        """
        width, heads = q.shape[-1], q.shape[1]
        extra = (-width - 1) % ALIGNED + 1
        own = F.pad((sinks / scale).to(q.dtype).view(1, heads, 1, 1), (0, extra - 1)).expand(len(q), -1, q.shape[2], -1)
        of_sink = F.pad(k.new_ones(len(k), 1, 1, 1), (width, extra - 1))
        k, v = torch.cat((F.pad(k, (0, extra)), of_sink), 2), F.pad(v, (0, extra, 0, 1))
        k, v = (x.expand(-1, heads, -1, -1) for x in (k, v))
        seen = F.pad(shared, (0, 1), value=True)
        return F.scaled_dot_product_attention(torch.cat((q, own), -1), k, v, attn_mask=seen, scale=scale)[..., :width]


class GroupedProjection(nn.Module):
    """Projects each group of heads to `rank` numbers with a matrix of its own. `groups` has the matrices of all groups, one below
    the other; strategies split it by groups."""

    treats_blocks_alike: ClassVar[bool] = True

    def __init__(self, inputs: int, groups: int, rank: int, std: float) -> None:
        """`inputs` is the width of the heads of a group."""
        super().__init__()
        self.rank, self.count, self.std = rank, groups, std
        self.groups = unfilled(groups * rank, inputs)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, heads * head_dim) -> (B, T, groups * rank)."""
        matrices = self.groups.unflatten(0, (-1, self.rank))
        return torch.einsum("btgi,gri->btgr", x.unflatten(-1, (len(matrices), -1)), matrices).flatten(2)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the spec of the matrices."""
        return {"groups": TensorSpec(("heads", None), Init("normal", self.std), "matrix", fused=(self.rank,) * self.count)}

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the layout: each group by itself."""
        return {"": ModuleSpec((HEADS,), (HEADS,))}


class WindowAttention(nn.Module):
    """Attention of a layer without compressed keys; see the module docstring. Parallel strategies may replace `core`."""

    treats_blocks_alike: ClassVar[bool] = True

    def __init__(
        self,
        context: BlockContext,
        *,
        q_lora_rank: int,
        o_groups: int,
        o_lora_rank: int,
        window: int,
        rate: int | None = None,
    ) -> None:
        """`rate` is that of compressed keys."""
        super().__init__()
        norm: Any = context.norm
        self.context, self.head_dim, self.eps = context, context.head_dim, norm.eps
        self.window = window
        self.mask_key = ("compressed", window, rate)
        self.rotary = Rotary(int(context.head_dim * context.rope.partial), context.rope.of_layer(rate is None))
        core: Any = SharedKeysWithSinks(rate)
        self.core = core
        self.scale = 1 / sqrt(self.head_dim)
        heads = context.heads * self.head_dim
        self.q_a_proj = Linear(context.dim, q_lora_rank)
        self.q_a_norm: nn.Module = norm.build(q_lora_rank)
        self.q_b_proj = Linear(q_lora_rank, heads)
        self.kv_proj = Linear(context.dim, self.head_dim)
        self.kv_norm: nn.Module = norm.build(self.head_dim)
        self.o_a_proj = GroupedProjection(heads // o_groups, o_groups, o_lora_rank, context.init_std)
        self.o_b_proj = Linear(o_groups * o_lora_rank, context.dim)
        self.sinks = unfilled(context.heads)

    def forward(self, x: Tensor, rotation: Rotation, attention_mask: Windows, cache: LayerCache | None = None) -> Any:
        """(B, T, dim) -> (B, T, dim). `attention_mask` is what the core prepared for this batch."""
        q, k = self.projected(self.q_a_norm(self.q_a_proj(x)), x, rotation)
        if cache is not None:
            k, _ = cache.update(k, k[..., :0])
        return self.joined(self.core(q, k, k, attention_mask.seen(), self.scale, sinks=self.sinks), rotation)

    def projected(self, latent: Tensor, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Returns rotated queries (B, heads, T, head_dim) and keys (B, 1, T, head_dim) from the latent of queries (B, T,
        q_lora_rank) and the input of the layer (B, T, dim)."""
        q = unit_rms(self.q_b_proj(latent).unflatten(-1, (-1, self.head_dim)).transpose(1, 2), self.eps)
        k = self.kv_norm(self.kv_proj(x)).unsqueeze(1)
        return tap("attention.q", rotate_pairs(q, rotation)), tap("attention.k", rotate_pairs(k, rotation))

    def joined(self, out: Tensor, rotation: Rotation) -> Tensor:
        """Rotates the outputs of all heads back and projects them, (B, heads, T, head_dim) -> (B, T, dim)."""
        heads = tap("attention.heads", rotate_pairs(out, rotation, back=True))
        return self.o_b_proj(self.o_a_proj(heads.transpose(1, 2).flatten(2)))

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs of the parameters, by name relative to this module, without those of its norms and parts."""
        enter = self.context.init_std
        return {
            **linear_specs("q_a_proj", self.q_a_proj, (None, "embed"), enter),
            **linear_specs("q_b_proj", self.q_b_proj, ("heads", None), enter),
            **linear_specs("kv_proj", self.kv_proj, (None, "embed"), enter),
            **linear_specs("o_b_proj", self.o_b_proj, ("embed", "heads"), self.context.output_std),
            "sinks": TensorSpec(("heads",), Init("zeros"), "vector"),
        }

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the modules whose inputs or outputs a strategy may shard, by name relative to this module."""
        return {
            "": ModuleSpec((STREAM,), (STREAM,)),
            "q_a_proj": ModuleSpec((STREAM,), (LOW,)),
            "q_b_proj": ModuleSpec((LOW,), (HEADS,)),
            "kv_proj": ModuleSpec((STREAM,), (LOW,)),
            "o_b_proj": ModuleSpec((HEADS,), (STREAM,)),
        }


class CompressedAttention(WindowAttention):
    """Attention of a layer that also sees all earlier compressed keys. With `overlaps`, compressed windows overlap."""

    treats_blocks_alike: ClassVar[bool] = True

    def __init__(self, context: BlockContext, *, rate: int, overlaps: bool = False, **sizes: Any) -> None:
        super().__init__(context, rate=rate, **sizes)
        self.compressor = Compressor(context, self.head_dim, rate, overlaps)

    def forward(self, x: Tensor, rotation: Rotation, attention_mask: Windows, cache: LayerCache | None = None) -> Any:
        """(B, T, dim) -> (B, T, dim). `attention_mask` is what the core prepared for this batch."""
        q, k = self.projected(self.q_a_norm(self.q_a_proj(x)), x, rotation)
        k, _ = self.with_entries(x, k, attention_mask, rotation, cache)
        return self.joined(self.core(q, k, k, attention_mask.seen(), self.scale, sinks=self.sinks), rotation)

    def with_entries(
        self, x: Tensor, k: Tensor, windows: Windows, rotation: Rotation, cache: LayerCache | None
    ) -> tuple[Tensor, Rotation]:
        """Returns the keys of all tokens, then the compressed ones, (B, 1, K + S, head_dim), and the rotation of the latter.
        A cache has, besides keys, what entries are made of, for each token: drafted tokens may be taken back."""
        first, made = windows.first(self.compressor.rate), self.compressor.projected(x)
        if cache is None:
            turn = rotation_at(rotation, first)
        else:
            turn = self.rotary(first[0])
            k, kept = cache.update(k, made.unsqueeze(1))
            made = kept.squeeze(1)
        return torch.cat((k, self.compressor(made, windows, turn)), 2), turn


class CompressedIndexer(nn.Module):
    """Scores compressed keys of its own for every query; the formula is that of `forge_models.blocks.indexer`."""

    treats_blocks_alike: ClassVar[bool] = True

    def __init__(self, context: BlockContext, query_width: int, heads: int, head_dim: int, rate: int) -> None:
        """`query_width` is the width of the latent from which its queries are computed."""
        super().__init__()
        self.init_std, self.heads, self.head_dim = context.init_std, heads, head_dim
        self.compressor = Compressor(context, head_dim, rate, overlaps=True)
        self.q_proj = Linear(query_width, heads * head_dim)
        self.weights_proj = Linear(context.dim, heads)

    def forward(
        self,
        x: Tensor,
        latent: Tensor,
        windows: Windows,
        rotation: Rotation,
        of_entries: Rotation,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """x (B, T, dim) and latent (B, T, query_width) -> scores (B, T, S), at least fp32. `of_entries` is the rotation of the
        compressed keys."""
        q = rotate_pairs(self.q_proj(latent).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2), rotation)
        made = self.compressor.projected(x)
        if cache is not None:
            made = cache.update_index(made.unsqueeze(1)).squeeze(1)
        k = self.compressor(made, windows, of_entries)
        wide = torch.promote_types(x.dtype, torch.float32)
        weights = self.weights_proj(x).to(wide) * (self.heads * self.head_dim) ** -0.5
        return index_scores(q.to(wide), k.squeeze(1).to(wide), weights)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs of the parameters, by name relative to this module, without those of its compressor."""
        return {
            **linear_specs("q_proj", self.q_proj, (None, None), self.init_std),
            **linear_specs("weights_proj", self.weights_proj, (None, "embed"), self.init_std),
        }

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the layout of its layers, which every rank holds whole."""
        return {"q_proj": ModuleSpec((LOW,), (LOW,)), "weights_proj": ModuleSpec((STREAM,), (LOW,))}


class SparseCompressedAttention(LearnsFromAttention, CompressedAttention):
    """Attention of a layer that also sees the compressed keys that an indexer chooses. A forward returns its output and the
    statistics for `observe`."""

    treats_blocks_alike: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("token_mask",)
    observes: ClassVar[bool] = True
    """True: its forward returns a second value for `observe`."""

    def __init__(
        self,
        context: BlockContext,
        *,
        rate: int,
        index_heads: int,
        index_dim: int,
        top_k: int,
        kl_weight: float,
        q_lora_rank: int,
        **sizes: Any,
    ) -> None:
        super().__init__(context, rate=rate, overlaps=True, q_lora_rank=q_lora_rank, **sizes)
        self.top_k, self.kl_weight = top_k, kl_weight
        self.indexer = CompressedIndexer(context, q_lora_rank, index_heads, index_dim, rate)
        self.head_sum = HeadSum()

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        attention_mask: Windows,
        cache: LayerCache | None = None,
        token_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T, dim) -> (B, T, dim), and statistics (2,); None in evaluation, and if the indexer is not trained.

        `attention_mask` is what the core prepared for this batch, `token_mask` (B, T) is False for padding.
        """
        latent = self.q_a_norm(self.q_a_proj(x))
        q, k = self.projected(latent, x, rotation)
        k, turn = self.with_entries(x, k, attention_mask, rotation, cache)
        scores = self.indexer(x.detach(), latent.detach(), attention_mask, rotation, turn, cache)
        assert attention_mask.entries is not None
        shown = attention_mask.entries.squeeze(1)
        if scores.shape[-1] > self.top_k:
            shown = chosen(scores, shown, self.top_k)
        seen = attention_mask.seen(shown)
        out = self.joined(self.core(q, k, k, seen, self.scale, sinks=self.sinks), rotation)
        if not (self.training and scores.requires_grad):
            return out, None
        every = k.detach().expand(-1, q.shape[1], -1, -1)
        sums = self.head_sum(q.detach(), every, seen.squeeze(1), self.scale, self.sinks.detach())
        target = sums[..., sums.shape[-1] - scores.shape[-1] :]
        return self.learned(out, target, scores, shown, token_mask, q.shape[1] / self.context.heads)

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the modules whose inputs or outputs a strategy may shard, by name relative to this module."""
        heads: tuple[Dim, ...] = ("batch", "heads", "sequence", None)
        return super().module_specs() | {"head_sum": ModuleSpec((heads,), (LOW,))}
