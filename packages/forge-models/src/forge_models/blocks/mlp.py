"""Feed-forward part of a block."""

from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.specs import Dim, Init, ModuleSpec, TensorSpec
from forge_models.blocks.layers import Linear
from forge_models.context import BlockContext
from forge_models.interp.tap import tap


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer, 2020)."""

    def __init__(self, context: BlockContext) -> None:
        super().__init__()
        self.context = context
        self.gate_proj = Linear(context.dim, context.ffn_dim)
        self.up_proj = Linear(context.dim, context.ffn_dim)
        self.down_proj = Linear(context.ffn_dim, context.dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, dim) -> (B, T, dim)."""
        return self.down_proj(F.silu(tap("mlp.pre_activation", self.gate_proj(x))) * self.up_proj(x))

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Parameters by name relative to this module."""
        enter = TensorSpec(("ffn", "embed"), Init("normal", self.context.init_std), "matrix")
        leave = TensorSpec(("embed", "ffn"), Init("normal", self.context.output_std), "matrix")
        return {"gate_proj.weight": enter, "up_proj.weight": enter, "down_proj.weight": leave}

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Modules whose inputs or outputs a strategy may lay out, by name relative to this module."""
        stream: tuple[Dim, ...] = ("batch", "sequence", "embed")
        hidden: tuple[Dim, ...] = ("batch", "sequence", "ffn")
        return {
            "": ModuleSpec((stream,), (stream,)),
            "gate_proj": ModuleSpec((stream,), (hidden,)),
            "up_proj": ModuleSpec((stream,), (hidden,)),
            "down_proj": ModuleSpec((hidden,), (stream,)),
        }
