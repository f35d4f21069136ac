"""Feed-forward layers and norms, chosen in `[model]`: `mlp = { name = "geglu" }`, `norm = { name = "rmsnorm", eps = 1e-6 }`.

The attribute `gated` of a feed-forward component says whether it has three matrices, and `activation` names its elementwise
function; experts use the same two.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Gt

from forge_core.component import IDENTITY, Component
from forge_core.specs import Matrix
from forge_models.shape import Activation, BlockContext, ClampedGate

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class FeedForward(Component):
    """Base class of the feed-forward components of this distribution."""

    gated: ClassVar[bool] = True

    @classmethod
    def passed(cls) -> tuple[str, ...]:
        """Returns the names of the arguments of the module: `activation`, which the class and `exact` determine, and `bias`."""
        return ("activation", "bias")

    def matrices(self, context: BlockContext) -> dict[str, Matrix]:
        """Returns the linear layers by name."""
        enter = Matrix((context.ffn_dim, context.dim), ("ffn", "embed"))
        leave = Matrix((context.dim, context.ffn_dim), ("embed", "ffn"))
        return ({"gate_proj": enter} if self.gated else {}) | {"up_proj": enter, "down_proj": leave}


@dataclass(frozen=True, kw_only=True)
class SwiGLU(FeedForward):
    """Feed-forward part down(silu(gate(x)) * up(x)), three matrices (Shazeer, 2020)."""

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_models.blocks.layers:GatedMLP"

    bias: bool = False
    """Whether every matrix has a bias."""
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
    """Whether GELU uses the error function instead of its tanh approximation."""
    bias: bool = False
    """Whether every matrix has a bias."""
    gated: ClassVar[bool] = True

    @property
    def activation(self) -> str:
        return "gelu" if self.exact else "gelu_tanh"


@dataclass(frozen=True, kw_only=True)
class ClampedSwiGLU(FeedForward):
    """Feed-forward part down((up(x) + shift) * gate(x) * sigmoid(slope * gate(x))) with gate(x) at most `limit` and up(x) between
    -limit and limit, three matrices (gpt-oss, 2025). With `slope` = 1 and `shift` = 0 it is SwiGLU of limited values
    (DeepSeek-V4)."""

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_models.blocks.layers:GatedMLP"

    limit: Annotated[float, Gt(0)] = 7.0
    """Limit of both matrices' outputs."""
    slope: Annotated[float, Gt(0)] = 1.702
    """Factor on the gate inside the sigmoid; 1.702 approximates GELU."""
    shift: Annotated[float, Ge(0)] = 1.0
    """Number that is added to up(x)."""
    bias: bool = False
    """Whether every matrix has a bias."""
    gated: ClassVar[bool] = True

    @property
    def activation(self) -> Activation:
        return ClampedGate(self.limit, self.slope, self.shift)


@dataclass(frozen=True, kw_only=True)
class GELU(FeedForward):
    """Feed-forward part down(gelu(up(x))), two matrices (Hendrycks and Gimpel, 2016)."""

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_models.blocks.layers:MLP"

    exact: bool = False
    """Whether GELU uses the error function instead of its tanh approximation."""
    bias: bool = False
    """Whether both matrices have a bias."""
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
    """Whether both matrices have a bias."""
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
    """Whether both matrices have a bias."""
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
    """Added to the weight: weights start at zero with offset 1 (Gemma), and at one with offset 0."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[RMSNormConfig]":
        """Returns one example for each offset."""
        return (cls(), cls(offset=1))


@dataclass(frozen=True, kw_only=True)
class LayerNormConfig(Component):
    """(x - mean) / sqrt(variance + eps) * weight + bias, with statistics in fp32 (Ba et al., 2016)."""

    key_class: ClassVar = IDENTITY
    implementation: ClassVar[str] = "forge_models.blocks.layers:LayerNorm"

    eps: Annotated[float, Gt(0)] = 1e-5
    """Added to the variance."""
    bias: bool = True
    """Whether a learned bias is added."""
    weight: bool = True
    """Whether a learned weight multiplies; without it and a bias, the norm has no parameters (OLMo)."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[LayerNormConfig]":
        """Returns examples with and without a bias and a weight."""
        return (cls(), cls(bias=False), cls(bias=False, weight=False))
