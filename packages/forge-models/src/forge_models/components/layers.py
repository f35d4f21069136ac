"""Feed-forward parts and norms, chosen inside `[model]`: `mlp = { name = "geglu" }`, `norm = { name = "rmsnorm", eps = 1e-6 }`.

Of a feed-forward part, `gated` says whether there are three matrices, `activation` which elementwise function; experts are made
of the same two.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Gt

from forge_core.component import IDENTITY, Component
from forge_core.specs import Matrix
from forge_models.shape import BlockContext

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class FeedForward(Component):
    """Base of the parts of this distribution."""

    gated: ClassVar[bool] = True

    @classmethod
    def passed(cls) -> tuple[str, ...]:
        """`activation`, which follows from the class and from `exact`, and `bias`."""
        return ("activation", "bias")

    def matrices(self, context: BlockContext) -> dict[str, Matrix]:
        """Its linear layers."""
        enter = Matrix((context.ffn_dim, context.dim), ("ffn", "embed"))
        leave = Matrix((context.dim, context.ffn_dim), ("embed", "ffn"))
        return ({"gate_proj": enter} if self.gated else {}) | {"up_proj": enter, "down_proj": leave}


@dataclass(frozen=True, kw_only=True)
class SwiGLU(FeedForward):
    """Feed-forward part down(silu(gate(x)) * up(x)), three matrices (Shazeer, 2020)."""

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_models.blocks.layers:GatedMLP"

    bias: bool = False
    """Every matrix has a bias."""
    gated: ClassVar[bool] = True

    @property
    def activation(self) -> str:
        return "silu"


@dataclass(frozen=True, kw_only=True)
class GeGLU(FeedForward):
    """Feed-forward part down(gelu(gate(x)) * up(x)), three matrices (Shazeer, 2020)."""

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_models.blocks.layers:GatedMLP"

    exact: bool = False
    """The error function itself instead of its approximation by tanh."""
    bias: bool = False
    """Every matrix has a bias."""
    gated: ClassVar[bool] = True

    @property
    def activation(self) -> str:
        return "gelu" if self.exact else "gelu_tanh"


@dataclass(frozen=True, kw_only=True)
class GELU(FeedForward):
    """Feed-forward part down(gelu(up(x))), two matrices (Hendrycks and Gimpel, 2016)."""

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_models.blocks.layers:MLP"

    exact: bool = False
    """The error function itself instead of its approximation by tanh."""
    bias: bool = False
    """Both matrices have a bias."""
    gated: ClassVar[bool] = False

    @property
    def activation(self) -> str:
        return "gelu" if self.exact else "gelu_tanh"


@dataclass(frozen=True, kw_only=True)
class ReLU(FeedForward):
    """Feed-forward part down(relu(up(x))), two matrices (Vaswani et al., 2017)."""

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_models.blocks.layers:MLP"

    bias: bool = False
    """Both matrices have a bias."""
    gated: ClassVar[bool] = False

    @property
    def activation(self) -> str:
        return "relu"


@dataclass(frozen=True, kw_only=True)
class ReLU2(FeedForward):
    """Feed-forward part down(relu(up(x))^2), two matrices (So et al., 2021)."""

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_models.blocks.layers:MLP"

    bias: bool = False
    """Both matrices have a bias."""
    gated: ClassVar[bool] = False

    @property
    def activation(self) -> str:
        return "relu2"


@dataclass(frozen=True, kw_only=True)
class RMSNormConfig(Component):
    """x / sqrt(mean(x^2) + eps) * (offset + weight), with statistics in fp32 (Zhang and Sennrich, 2019)."""

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_models.blocks.layers:RMSNorm"

    eps: Annotated[float, Gt(0)] = 1e-5
    """Added to the mean square."""
    offset: Literal[0, 1] = 0
    """Added to the weight; with 1 (Gemma) weights start at zero, with 0 at one."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[RMSNormConfig]":
        """Both offsets."""
        return (cls(), cls(offset=1))


@dataclass(frozen=True, kw_only=True)
class LayerNormConfig(Component):
    """(x - mean) / sqrt(variance + eps) * weight + bias, with statistics in fp32 (Ba et al., 2016)."""

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_models.blocks.layers:LayerNorm"

    eps: Annotated[float, Gt(0)] = 1e-5
    """Added to the variance."""
    bias: bool = True
    """A learned bias is added."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[LayerNormConfig]":
        """With and without a bias."""
        return (cls(), cls(bias=False))
