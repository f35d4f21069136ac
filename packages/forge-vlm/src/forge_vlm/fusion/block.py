"""A block whose feed-forward part, and on request everything else that has weights, is that of a token's modality."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from forge_core.specs import ModuleSpec
from forge_models.blocks.attention import STREAM
from forge_models.blocks.rope import Rotation
from forge_models.generation.cache import LayerCache
from forge_models.interp.tap import tap
from forge_models.moe.layer import ExpertLayer
from forge_models.shape import DecoderShape
from forge_vlm.fusion.experts import ModalityExperts
from forge_vlm.fusion.untied import UntiedAttention
from forge_vlm.groups import ByModality, Groups


class ModalityBlock(nn.Module):
    """x + after(attention(before(x))), then the same with the feed-forward part, as `forge_models.blocks.block.Block`.

    `untied`: attention and norms have weights for each modality too. In a `sparse` block experts of each modality stand in the
    place of the feed-forward part.
    """

    def __init__(
        self,
        shape: DecoderShape,
        layer: int,
        names: tuple[str, ...],
        *,
        untied: bool,
        experts: Callable[[Any, Any, Any], nn.Module] = ExpertLayer,
    ) -> None:
        super().__init__()
        context = shape.context(layer)
        norm: Any = shape.norm
        attention: Any = shape.attention
        mlp: Any = shape.mlp

        def each(build: Callable[[], nn.Module]) -> nn.Module:
            return ByModality({name: build() for name in names}) if untied else build()

        def norm_of(wanted: bool) -> nn.Module | None:
            return each(lambda: norm.build(shape.dim)) if wanted else None

        before, after = shape.norm_placement != "post", shape.norm_placement != "pre"
        self.untied, self.multiplier = untied, shape.residual_multiplier
        self.attention_norm = norm_of(before)
        copies = {name: attention.build(context) for name in names} if untied else {}
        self.attention: nn.Module = UntiedAttention(copies) if untied else attention.build(context)
        self.attention_post_norm = norm_of(after)
        self.mlp_norm = norm_of(before)
        moe = shape.moe if shape.has_experts(layer) else None
        self.sparse = moe is not None
        self.mlp: nn.Module = (
            ByModality({name: mlp.build(context) for name in names})
            if moe is None
            else ModalityExperts(names, moe, mlp, context, experts)
        )
        self.mlp_post_norm = norm_of(after)
        self.reads = ("groups", *(("token_mask", "tokens", "documents") if self.sparse else ()))

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        attention_mask: Any,
        cache: LayerCache | None = None,
        groups: Groups | None = None,
        **routing: Tensor | None,
    ) -> Tensor | tuple[Tensor, Any]:
        """(B, T, dim) -> (B, T, dim); a sparse block also returns the router statistics of its layers of experts.

        Args:
            x: the stream.
            rotation: rotation of this layer.
            attention_mask: what the attention core prepared for this batch.
            cache: keys and values of earlier tokens.
            groups: the places of each modality's tokens.
            routing: what experts look at.
        """
        assert groups is not None
        x = tap("residual", x)
        extra = (groups,) if self.untied else ()
        inner = self.attention(self._normed(x, self.attention_norm, groups), rotation, attention_mask, cache, *extra)
        inner = self._scaled(tap("attention.output", inner), self.attention_post_norm, groups)
        x = tap("residual_mid", x + tap("attention.added", inner))
        inner = self._normed(x, self.mlp_norm, groups)
        if not self.sparse:
            return self._end(x, self.mlp(inner, groups), groups)
        inner, router_stats = self.mlp(inner, groups, cached=cache is not None, **routing)
        return self._end(x, inner, groups), router_stats

    def observed(self, router_stats: tuple[Tensor | None, ...]) -> list[tuple[Any, Tensor]]:
        """Each layer of experts with its statistics; one that is frozen counts nothing."""
        experts: Any = self.mlp
        return [(layer, found) for layer, found in zip(experts.layers.values(), router_stats, strict=True) if found is not None]

    def _normed(self, x: Tensor, norm: nn.Module | None, groups: Groups) -> Tensor:
        if norm is None:
            return x
        return norm(x, groups) if self.untied else norm(x)

    def _end(self, x: Tensor, inner: Tensor, groups: Groups) -> Tensor:
        added = tap("mlp.added", self._scaled(tap("mlp.output", inner), self.mlp_post_norm, groups))
        return tap("residual_after", x + added)

    def _scaled(self, inner: Tensor, norm: nn.Module | None, groups: Groups) -> Tensor:
        inner = self._normed(inner, norm, groups)
        return inner if self.multiplier == 1 else inner * self.multiplier

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Layout of the norms, which strategies may split along the sequence."""
        stream = ModuleSpec((STREAM,), (STREAM,))
        names = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")
        found = [(name, norm) for name in names if (norm := getattr(self, name)) is not None]
        if self.untied:
            return {f"{name}.{copy}": stream for name, norm in found for copy in norm}
        return {name: stream for name, _ in found}
