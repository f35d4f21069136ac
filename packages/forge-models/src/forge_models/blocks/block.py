"""One block of a decoder."""

from typing import Any

from torch import Tensor, nn

from forge_core.specs import ModuleSpec
from forge_models.blocks.cache import LayerCache
from forge_models.blocks.moe.layer import ExpertLayer
from forge_models.blocks.rope import Rotation
from forge_models.inner_values import tap
from forge_models.shape import DecoderShape


class Block(nn.Module):
    """x + after(attention(before(x))), then the same with the feed-forward layer.

    `before` and `after` are norms or the identity, depending on `norm_placement`: `pre` has only the first, `post` only the
    second, `sandwich` both. A `sparse` block has experts instead of the feed-forward layer.
    """

    def __init__(self, shape: DecoderShape, layer: int) -> None:
        super().__init__()
        context = shape.context(layer)
        norm: Any = shape.norm
        attention: Any = shape.attention
        mlp: Any = shape.mlp
        before, after = shape.norm_placement != "post", shape.norm_placement != "pre"
        self.multiplier = shape.residual_multiplier
        self.attention_norm: nn.Module | None = norm.build(shape.dim) if before else None
        self.attention: nn.Module = attention.build(context)
        self.attention_post_norm: nn.Module | None = norm.build(shape.dim) if after else None
        self.mlp_norm: nn.Module | None = norm.build(shape.dim) if before else None
        moe = shape.moe if shape.has_experts(layer) else None
        self.sparse = moe is not None
        self.reads = ("token_mask", "tokens") if self.sparse else ()
        self.mlp: nn.Module = mlp.build(context) if moe is None else ExpertLayer(moe, mlp, context)
        self.mlp_post_norm: nn.Module | None = norm.build(shape.dim) if after else None

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        attention_mask: Any,
        cache: LayerCache | None = None,
        token_mask: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """(B, T, dim) -> (B, T, dim); a sparse block also returns its router statistics.

        Args:
            x: residual stream.
            rotation: rotation of this layer.
            attention_mask: mask that the attention core prepared for this batch.
            cache: keys and values of earlier tokens.
            token_mask: (B, T) False for padding; used by sparse blocks only.
            tokens: (B, T) token ids, for routers that need them; used by sparse blocks only.
        """
        x = tap("residual", x)
        inner = tap("attention.output", self.attention(_normed(x, self.attention_norm), rotation, attention_mask, cache))
        x = tap("residual_mid", x + tap("attention.added", self._scaled(inner, self.attention_post_norm)))
        inner = _normed(x, self.mlp_norm)
        if not self.sparse:
            return self._end(x, self.mlp(inner))
        inner, router_stats = self.mlp(inner, token_mask, tokens, cache is not None)
        return self._end(x, inner), router_stats

    def _end(self, x: Tensor, inner: Tensor) -> Tensor:
        added = tap("mlp.added", self._scaled(tap("mlp.output", inner), self.mlp_post_norm))
        return tap("residual_after", x + added)

    def _scaled(self, inner: Tensor, norm: nn.Module | None) -> Tensor:
        inner = _normed(inner, norm)
        return inner if self.multiplier == 1 else inner * self.multiplier

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the layout of the norms, which strategies may shard along the sequence."""
        stream = ModuleSpec((("batch", "sequence", "embed"),), (("batch", "sequence", "embed"),))
        names = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")
        return {name: stream for name in names if getattr(self, name) is not None}


def _normed(x: Tensor, norm: nn.Module | None) -> Tensor:
    return x if norm is None else norm(x)
