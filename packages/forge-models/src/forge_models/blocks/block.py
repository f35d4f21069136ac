"""One block of a decoder."""

from typing import Any

from torch import Tensor, nn

from forge_core.specs import ModuleSpec
from forge_models.blocks.rope import Rotation
from forge_models.cache import LayerCache
from forge_models.components.decoder import Decoder
from forge_models.interp.tap import tap


class Block(nn.Module):
    """x + after(attention(before(x))), then the same with the feed-forward part.

    `before` and `after` are norms or nothing, as `norm_placement` says: pre has only the first, post only the second,
    sandwich both.
    """

    def __init__(self, config: Decoder, layer: int) -> None:
        super().__init__()
        context = config.context(layer)
        norm: Any = config.resolved_norm
        attention: Any = config.resolved_attention
        mlp: Any = config.resolved_mlp
        before, after = config.norm_placement != "post", config.norm_placement != "pre"
        self.multiplier = config.residual_multiplier
        self.attention_norm: nn.Module | None = norm.build(config.dim) if before else None
        self.attention: nn.Module = attention.build(context)
        self.attention_post_norm: nn.Module | None = norm.build(config.dim) if after else None
        self.mlp_norm: nn.Module | None = norm.build(config.dim) if before else None
        self.mlp: nn.Module = mlp.build(context)
        self.mlp_post_norm: nn.Module | None = norm.build(config.dim) if after else None

    def forward(self, x: Tensor, turn: Rotation, shared: Any, cache: LayerCache | None = None) -> Tensor:
        """(B, T, dim) -> (B, T, dim). `shared` is what the attention core prepared for this batch."""
        x = tap("residual", x)
        inner = self.attention(_normed(x, self.attention_norm), turn, shared, cache)
        x = self._added(x, tap("attention.output", inner), self.attention_post_norm)
        return self._added(x, self.mlp(_normed(x, self.mlp_norm)), self.mlp_post_norm)

    def _added(self, x: Tensor, inner: Tensor, norm: nn.Module | None) -> Tensor:
        inner = _normed(inner, norm)
        return x + (inner if self.multiplier == 1 else inner * self.multiplier)

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Layout of the norms, which strategies may split along the sequence."""
        stream = ModuleSpec((("batch", "sequence", "embed"),), (("batch", "sequence", "embed"),))
        names = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")
        return {name: stream for name in names if getattr(self, name) is not None}


def _normed(x: Tensor, norm: nn.Module | None) -> Tensor:
    return x if norm is None else norm(x)
