"""Feed-forward part of a block: two matrices, or three with a gate."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.specs import Dim, ModuleSpec, TensorSpec
from forge_models.blocks.layers import Linear, linear_specs
from forge_models.context import BlockContext
from forge_models.interp.tap import tap

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
        "relu2": lambda x: F.relu(x).square(),
    }
)
"""Elementwise functions by name; `gelu` is the error function's form."""

STREAM: tuple[Dim, ...] = ("batch", "sequence", "embed")
HIDDEN: tuple[Dim, ...] = ("batch", "sequence", "ffn")


class MLP(nn.Module):
    """down(activation(up(x)))."""

    def __init__(self, context: BlockContext, *, activation: str, bias: bool = False) -> None:
        super().__init__()
        self.context = context
        self.activation = activation
        self.tapped = "mlp."  # what names of inner values begin with; experts that are shared have another
        self.up_proj = Linear(context.dim, context.ffn_dim, bias)
        self.down_proj = Linear(context.ffn_dim, context.dim, bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, dim) -> (B, T, dim)."""
        hidden = ACTIVATIONS[self.activation](tap(self.tapped + "pre_activation", self.up_proj(x)))
        return self.down_proj(tap(self.tapped + "hidden", hidden))

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Parameters by name relative to this module."""
        enter = linear_specs("up_proj", self.up_proj, ("ffn", "embed"), self.context.init_std)
        return enter | linear_specs("down_proj", self.down_proj, ("embed", "ffn"), self.context.output_std)

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Modules whose inputs or outputs a strategy may lay out, by name relative to this module."""
        return {
            "": ModuleSpec((STREAM,), (STREAM,)),
            "up_proj": ModuleSpec((STREAM,), (HIDDEN,)),
            "down_proj": ModuleSpec((HIDDEN,), (STREAM,)),
        }


class GatedMLP(MLP):
    """down(activation(gate(x)) * up(x)) (Shazeer, 2020)."""

    def __init__(self, context: BlockContext, *, activation: str, bias: bool = False) -> None:
        super().__init__(context, activation=activation, bias=bias)
        self.gate_proj = Linear(context.dim, context.ffn_dim, bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, dim) -> (B, T, dim)."""
        gate = ACTIVATIONS[self.activation](tap(self.tapped + "pre_activation", self.gate_proj(x)))
        return self.down_proj(tap(self.tapped + "hidden", gate * tap(self.tapped + "linear", self.up_proj(x))))

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Parameters by name relative to this module."""
        gate = linear_specs("gate_proj", self.gate_proj, ("ffn", "embed"), self.context.init_std)
        return gate | super().tensor_specs()

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Modules whose inputs or outputs a strategy may lay out, by name relative to this module."""
        return {"gate_proj": ModuleSpec((STREAM,), (HIDDEN,))} | super().module_specs()
