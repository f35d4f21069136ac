"""One block of a pre-norm decoder."""

from typing import Any

from torch import Tensor, nn

from forge_core.specs import ModuleSpec
from forge_models.blocks.rope import Rotation
from forge_models.cache import LayerCache
from forge_models.components.decoder import Decoder
from forge_models.interp.tap import tap


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: Decoder, layer: int) -> None:
        super().__init__()
        context = config.context(layer)
        norm: Any = config.resolved_norm
        attention: Any = config.resolved_attention
        mlp: Any = config.resolved_mlp
        self.attention_norm: nn.Module = norm.build(config.dim)
        self.attention: nn.Module = attention.build(context)
        self.mlp_norm: nn.Module = norm.build(config.dim)
        self.mlp: nn.Module = mlp.build(context)

    def forward(self, x: Tensor, turn: Rotation, shared: Any, cache: LayerCache | None = None) -> Tensor:
        """(B, T, dim) -> (B, T, dim). `shared` is what the attention core prepared for this batch."""
        x = tap("residual", x)
        x = x + tap("attention.output", self.attention(self.attention_norm(x), turn, shared, cache))
        return x + self.mlp(self.mlp_norm(x))

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Layout of the norms, which strategies may split along the sequence."""
        stream = ModuleSpec((("batch", "sequence", "embed"),), (("batch", "sequence", "embed"),))
        return {"attention_norm": stream, "mlp_norm": stream}
