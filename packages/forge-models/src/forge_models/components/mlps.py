"""Feed-forward part of a block, chosen inside `[model]`: `mlp = { name = "geglu" }`.

`gated` says whether there are three matrices, `activation` which elementwise function; experts are made of the same two.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from forge_core.component import IDENTITY, Component
from forge_core.specs import Matrix
from forge_models.context import BlockContext

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class FeedForward(Component):
    """Base of the parts of this distribution."""

    gated: ClassVar[bool] = True

    def matrices(self, context: BlockContext) -> dict[str, Matrix]:
        """Its linear layers."""
        enter = Matrix((context.ffn_dim, context.dim), ("ffn", "embed"))
        leave = Matrix((context.dim, context.ffn_dim), ("embed", "ffn"))
        return ({"gate_proj": enter} if self.gated else {}) | {"up_proj": enter, "down_proj": leave}


@dataclass(frozen=True, kw_only=True)
class SwiGLU(FeedForward):
    """Feed-forward part down(silu(gate(x)) * up(x)), three matrices (Shazeer, 2020)."""

    key_class: ClassVar = IDENTITY

    bias: bool = False
    """Every matrix has a bias."""
    gated: ClassVar[bool] = True

    @property
    def activation(self) -> str:
        return "silu"

    def build(self, context: BlockContext) -> "nn.Module":
        from forge_models.blocks.mlp import GatedMLP

        return GatedMLP(context, activation=self.activation, bias=self.bias)


@dataclass(frozen=True, kw_only=True)
class GeGLU(FeedForward):
    """Feed-forward part down(gelu(gate(x)) * up(x)), three matrices (Shazeer, 2020)."""

    key_class: ClassVar = IDENTITY

    exact: bool = False
    """The error function itself instead of its approximation by tanh."""
    bias: bool = False
    """Every matrix has a bias."""
    gated: ClassVar[bool] = True

    @property
    def activation(self) -> str:
        return "gelu" if self.exact else "gelu_tanh"

    def build(self, context: BlockContext) -> "nn.Module":
        from forge_models.blocks.mlp import GatedMLP

        return GatedMLP(context, activation=self.activation, bias=self.bias)


@dataclass(frozen=True, kw_only=True)
class GELU(FeedForward):
    """Feed-forward part down(gelu(up(x))), two matrices (Hendrycks and Gimpel, 2016)."""

    key_class: ClassVar = IDENTITY

    exact: bool = False
    """The error function itself instead of its approximation by tanh."""
    bias: bool = False
    """Both matrices have a bias."""
    gated: ClassVar[bool] = False

    @property
    def activation(self) -> str:
        return "gelu" if self.exact else "gelu_tanh"

    def build(self, context: BlockContext) -> "nn.Module":
        from forge_models.blocks.mlp import MLP

        return MLP(context, activation=self.activation, bias=self.bias)


@dataclass(frozen=True, kw_only=True)
class ReLU(FeedForward):
    """Feed-forward part down(relu(up(x))), two matrices (Vaswani et al., 2017)."""

    key_class: ClassVar = IDENTITY

    bias: bool = False
    """Both matrices have a bias."""
    gated: ClassVar[bool] = False

    @property
    def activation(self) -> str:
        return "relu"

    def build(self, context: BlockContext) -> "nn.Module":
        from forge_models.blocks.mlp import MLP

        return MLP(context, activation=self.activation, bias=self.bias)


@dataclass(frozen=True, kw_only=True)
class ReLU2(FeedForward):
    """Feed-forward part down(relu(up(x))^2), two matrices (So et al., 2021)."""

    key_class: ClassVar = IDENTITY

    bias: bool = False
    """Both matrices have a bias."""
    gated: ClassVar[bool] = False

    @property
    def activation(self) -> str:
        return "relu2"

    def build(self, context: BlockContext) -> "nn.Module":
        from forge_models.blocks.mlp import MLP

        return MLP(context, activation=self.activation, bias=self.bias)
