"""Images outside of the sequence: text attends to them in gated blocks (Flamingo, Alayrac et al., 2022; Llama 3, 2024, 7.3)."""

from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.specs import Init, ModuleSpec, TensorSpec
from forge_models.blocks.attention import HEADS, KV_HEADS, STREAM
from forge_models.blocks.block import Block
from forge_models.blocks.cache import LayerCache
from forge_models.blocks.layers import Linear, linear_specs, unfilled
from forge_models.blocks.rope import Rotation
from forge_models.inner_values import inside, tap, tap_alike
from forge_models.shape import BlockContext, DecoderShape
from forge_vlm.context import FusionContext
from forge_vlm.fusion.fusion import FusionBase, Inputs, seen_images, with_zero_gradient


class ImageCrossAttention(nn.Module):
    """softmax(q k^T / sqrt(head_dim)) v with queries from text, and keys and values from images. Queries and keys are normalized
    per head and not rotated."""

    def __init__(self, context: BlockContext) -> None:
        super().__init__()
        self.context = context
        heads, kv_heads = context.heads * context.head_dim, context.kv_heads * context.head_dim
        norm: Any = context.norm
        self.q_proj = Linear(context.dim, heads)
        self.k_proj = Linear(context.dim, kv_heads)
        self.v_proj = Linear(context.dim, kv_heads)
        self.o_proj = Linear(heads, context.dim)
        self.q_norm: nn.Module = norm.build(context.head_dim)
        self.k_norm: nn.Module = norm.build(context.head_dim)

    def forward(self, both: Tensor, length: int, sees: Tensor, cache: LayerCache | None = None) -> Tensor:
        """(B, length + S, dim) -> (B, length, dim). Text and images are one tensor, so that a strategy can lay out the whole
        input.

        Args:
            both: normalized text, then the image vectors of each row.
            length: number of text tokens.
            sees: (B, 1, length, S) bool mask; the result for a token that sees nothing is undefined.
            cache: stores keys and values of images; from the second call on, `both` may have only text.
        """
        x, visual = both.split((length, both.shape[1] - length), dim=1)
        q = self.q_norm(self._heads(self.q_proj(x)))
        if cache is not None and cache.memory is not None:
            k, v = cache.memory
        else:
            k, v = self.k_norm(self._heads(self.k_proj(visual))), self._heads(self.v_proj(visual))
            if cache is not None:
                cache.memory = (k, v)
        q, k = tap("cross.attention.q", q), tap("cross.attention.k", k)
        scale = 1 / sqrt(self.context.head_dim)
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scale, enable_gqa=grouped)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.context.head_dim)).transpose(1, 2)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the parameters by name relative to this module, without those of its norms."""
        enter = self.context.init_std
        return {
            **linear_specs("q_proj", self.q_proj, ("heads", "embed"), enter),
            **linear_specs("k_proj", self.k_proj, ("kv_heads", "embed"), enter),
            **linear_specs("v_proj", self.v_proj, ("kv_heads", "embed"), enter),
            **linear_specs("o_proj", self.o_proj, ("embed", "heads"), self.context.output_std),
        }

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the modules whose inputs or outputs a strategy may lay out, by name relative to this module."""
        return {
            "": ModuleSpec((STREAM,), (STREAM,)),
            "q_proj": ModuleSpec((STREAM,), (HEADS,)),
            "k_proj": ModuleSpec((STREAM,), (KV_HEADS,)),
            "v_proj": ModuleSpec((STREAM,), (KV_HEADS,)),
            "o_proj": ModuleSpec((HEADS,), (STREAM,)),
        }


class GatedCross(nn.Module):
    """x + tanh(g) attention(x, images), then the same with a feed-forward part. Gates start at 0, so the module starts as the
    identity.

    Tokens that see no image pass through unchanged.
    """

    def __init__(self, shape: DecoderShape, layer: int) -> None:
        super().__init__()
        context = shape.context(layer)
        norm: Any = shape.norm
        mlp: Any = shape.mlp
        self.attention_norm: nn.Module = norm.build(shape.dim)
        self.attention = ImageCrossAttention(context)
        self.mlp_norm: nn.Module = norm.build(shape.dim)
        self.mlp: nn.Module = mlp.build(context)
        self.attention_gate = unfilled(1)
        self.mlp_gate = unfilled(1)

    def forward(self, x: Tensor, visual: Tensor, sees: Tensor, cache: LayerCache | None = None) -> Tensor:
        """(B, T, dim), `visual` (B, S, dim), `sees` (B, 1, T, S) bool -> (B, T, dim)."""
        any_seen = sees.any(-1).transpose(1, 2)  # (B, T, 1)
        # A softmax over no entries would be NaN, so a token without images sees everything here and is masked afterwards.
        open_rows = sees | ~any_seen.transpose(1, 2).unsqueeze(-1)
        inner = self.attention(torch.cat((self.attention_norm(x), visual), dim=1), x.shape[1], open_rows, cache)
        gate = tap_alike("cross.attention.gate", self.attention_gate.tanh(), x.shape[:2])
        x = x + gate * inner.masked_fill(~any_seen, 0)
        inner = inside("cross.", self.mlp, self.mlp_norm(x))
        return x + tap_alike("cross.mlp.gate", self.mlp_gate.tanh(), x.shape[:2]) * inner.masked_fill(~any_seen, 0)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the gates."""
        gate = TensorSpec((None,), Init("zeros"), "vector")
        return {"attention_gate": gate, "mlp_gate": gate}

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the layout of the norms."""
        stream = ModuleSpec((STREAM,), (STREAM,))
        return {"attention_norm": stream, "mlp_norm": stream}


class CrossBlock(Block):
    """A gated cross block, then a block of the text model. Rows without images change only in the latter."""

    added = ("cross",)
    """Names of the modules that a text model does not have."""

    def __init__(self, shape: DecoderShape, layer: int) -> None:
        super().__init__(shape, layer)
        self.cross = GatedCross(shape, layer)
        self.reads = (*self.reads, "visual", "sees")

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        rotation: Rotation,
        attention_mask: Any,
        cache: LayerCache | None = None,
        visual: Tensor | None = None,
        sees: Tensor | None = None,
        **routing: Any,
    ) -> Any:
        """As in `Block`, with the image vectors `visual` (B, S, dim) of each row, and `sees` (B, 1, T, S), the mask of those that
        a token sees. If `sees` is None, no row has an image: the cross block runs on one vector and its gradients are zero."""
        if visual is not None and sees is not None:
            x = self.cross(x, visual, sees, cache)
        elif visual is not None:
            x = with_zero_gradient(x, self.cross(visual, visual, visual.new_ones((1, 1, 1, 1), dtype=torch.bool)))
        return super().forward(x, rotation, attention_mask, cache, **routing)


class CrossAttentionFusion(FusionBase):
    """A fusion with gated cross blocks between the blocks of a text model."""

    in_stream = False

    def __init__(self, context: FusionContext, *, every: int = 4) -> None:
        super().__init__(context)
        self.every = every

    def block(self, shape: DecoderShape, layer: int) -> nn.Module:
        """Returns the block of a layer: with a cross block in the last of every `every` layers (3, 7, ... for 4)."""
        return CrossBlock(shape, layer) if (layer + 1) % self.every == 0 else Block(shape, layer)

    def shared(self, inputs: Inputs) -> dict[str, Any]:
        """Returns the image vectors of each row, and the mask of those that each token sees."""
        token, tokens, cache = self.context.image_token, inputs.tokens, inputs.cache
        assert token is not None
        if cache is not None and "seen" in cache.kept:
            # A generated token sees the same images as the end of the prompt; keys and values are in the cache.
            sees = cache.kept["seen"].unsqueeze(1).expand(-1, tokens.shape[1], -1).unsqueeze(1)
            return {"visual": cache.kept["none"], "sees": sees}
        if inputs.visual is None or inputs.image_rows is None:
            return {}
        if not len(inputs.visual):
            # Not empty, because strategies communicate its results. Encoder and adapter get their gradients through the stream.
            return {"visual": inputs.visual.detach().new_zeros((1, 1, inputs.visual.shape[-1]))}
        rows, (first, end) = inputs.image_rows, seen_images(tokens, token, inputs.documents)
        visual = inputs.visual[rows.clamp(min=0)].flatten(1, 2)  # (B, M * per_image, dim)
        slots = torch.arange(rows.shape[1], device=rows.device)
        seen = (first.unsqueeze(-1) <= slots) & (slots < end.unsqueeze(-1)) & (rows >= 0).unsqueeze(1)
        seen = seen.repeat_interleave(inputs.visual.shape[1], dim=-1)
        if inputs.present is not None:
            seen = seen & inputs.present[rows.clamp(min=0)].flatten(1).unsqueeze(1)
        if cache is not None:
            cache.kept |= {"seen": seen[:, -1], "none": visual[:, :0]}
        return {"visual": visual, "sees": seen.unsqueeze(1)}
