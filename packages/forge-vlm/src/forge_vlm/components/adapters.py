"""Adapters, chosen inside `[model]`: `adapter = { name = "mlp" }`.

`tokens(n)` returns the number of tokens for an image with n features. It raises a `ValueError` if the adapter does not accept n.

`native` is set by adapters that accept images of any proportions, whose features are padded. With `each`, every feature becomes a
token. With `seen`, every image has the same number of tokens, and the module receives a mask (N, n) bool, True for real features.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from annotated_types import Ge, Gt, Le

from forge_core.component import IDENTITY, Component
from forge_vlm.context import AdapterContext, count_windows, grid_side

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import nn

    from forge_vlm.adapters import Projection

Hidden = Annotated[int, Ge(0), Le(2)]


def projection(context: AdapterContext, inputs: int, hidden: int, hidden_dim: int | None, bias: bool) -> "Projection":
    """Builds a projection from `inputs` to the decoder's width, which is also the default width of hidden layers."""
    from forge_vlm.adapters import Projection

    width = context.dim if hidden_dim is None else hidden_dim
    return Projection(inputs, context.dim, hidden=hidden, hidden_dim=width, bias=bias, std=context.init_std)


@dataclass(frozen=True, kw_only=True)
class LinearConfig(Component):
    """One matrix; every feature becomes a token (LLaVA, Liu et al., 2023)."""

    key_class: ClassVar = IDENTITY
    native: ClassVar[str] = "each"

    bias: bool = True
    """Adds a bias to the matrix."""

    def tokens(self, n: int) -> int:
        """Returns n: one token per feature."""
        return n

    def build(self, context: AdapterContext) -> "nn.Module":
        return projection(context, context.width, 0, None, self.bias)


@dataclass(frozen=True, kw_only=True)
class MLPConfig(Component):
    """A feed-forward network with exact gelu; every feature becomes a token (LLaVA-1.5, Liu et al., 2024)."""

    key_class: ClassVar = IDENTITY
    native: ClassVar[str] = "each"

    hidden: Annotated[int, Ge(1), Le(2)] = 1
    """Number of hidden layers."""
    hidden_dim: Annotated[int, Gt(0)] | None = None
    """Width of a hidden layer; by default the width of the decoder."""
    bias: bool = True
    """Adds a bias to every matrix."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[MLPConfig]":
        """Returns one with one hidden layer and one with two."""
        return (cls(), cls(hidden=2, hidden_dim=12, bias=False))

    def tokens(self, n: int) -> int:
        """Returns n: one token per feature."""
        return n

    def build(self, context: AdapterContext) -> "nn.Module":
        return projection(context, context.width, self.hidden, self.hidden_dim, self.bias)


@dataclass(frozen=True, kw_only=True)
class AveragePoolConfig(Component):
    """The mean of each window of the grid, then a projection. Windows at the edges may be smaller."""

    key_class: ClassVar = IDENTITY

    window: Annotated[int, Gt(0)] = 2
    """Height and width of a window in features."""
    hidden: Hidden = 0
    """Hidden layers of the projection, with exact gelu; 0 is one matrix."""
    hidden_dim: Annotated[int, Gt(0)] | None = None
    """Width of a hidden layer; by default the width of the decoder."""
    bias: bool = True
    """Adds a bias to every matrix of the projection."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[AveragePoolConfig]":
        """Returns windows that divide the grid, and windows that do not."""
        return (cls(), cls(window=3, hidden=1))

    def tokens(self, n: int) -> int:
        """Returns ceil(sqrt(n) / window)^2."""
        return (-(-grid_side(n, "average_pool") // self.window)) ** 2

    def build(self, context: AdapterContext) -> "nn.Module":
        from forge_vlm import adapters

        self.tokens(context.tokens)
        return adapters.AveragePoolAdapter(
            self.window, projection(context, context.width, self.hidden, self.hidden_dim, self.bias)
        )


@dataclass(frozen=True, kw_only=True)
class AttentionPoolConfig(Component):
    """Attention inside of each window, whose query is the window's mean, then a projection (Molmo, Deitke et al., 2024)."""

    key_class: ClassVar = IDENTITY

    window: Annotated[int, Gt(0)] = 2
    """Height and width of a window in features; must divide the grid."""
    heads: Annotated[int, Gt(0)] = 8
    """Number of attention heads, a divisor of the width of features."""
    hidden: Hidden = 1
    """Hidden layers of the projection, with exact gelu; 0 is one matrix."""
    hidden_dim: Annotated[int, Gt(0)] | None = None
    """Width of a hidden layer; by default the width of the decoder."""
    bias: bool = True
    """Adds a bias to every matrix of the projection."""

    def tokens(self, n: int) -> int:
        """Returns n / window^2."""
        return count_windows(n, self.window, "attention_pool.window")

    def check(self, context: AdapterContext) -> None:
        """Raises a ValueError if `heads` does not divide the encoder's width."""
        self.tokens(context.tokens)
        if context.width % self.heads:
            raise ValueError(f"attention_pool: heads {self.heads} must divide the feature width {context.width}")

    def build(self, context: AdapterContext) -> "nn.Module":
        from forge_vlm import adapters

        self.check(context)
        leave = projection(context, context.width, self.hidden, self.hidden_dim, self.bias)
        return adapters.AttentionPoolAdapter(context.width, self.window, self.heads, context.init_std, leave)


@dataclass(frozen=True, kw_only=True)
class PixelShuffleConfig(Component):
    """The features of each window are concatenated, then projected: fewer tokens without loss before the projection (Idefics3,
    2024)."""

    key_class: ClassVar = IDENTITY

    factor: Annotated[int, Gt(0)] = 2
    """Height and width of a window in features; must divide the grid."""
    hidden: Hidden = 0
    """Hidden layers of the projection, with exact gelu; 0 is one matrix."""
    hidden_dim: Annotated[int, Gt(0)] | None = None
    """Width of a hidden layer; by default the width of the decoder."""
    bias: bool = False
    """Adds a bias to every matrix of the projection."""

    def tokens(self, n: int) -> int:
        """Returns n / factor^2."""
        return count_windows(n, self.factor, "pixel_shuffle.factor")

    def build(self, context: AdapterContext) -> "nn.Module":
        from forge_vlm import adapters

        self.tokens(context.tokens)
        inputs = context.width * self.factor**2
        return adapters.PixelShuffleAdapter(self.factor, projection(context, inputs, self.hidden, self.hidden_dim, self.bias))


@dataclass(frozen=True, kw_only=True)
class PerceiverConfig(Component):
    """Learned tokens attend to all features in each layer (Jaegle et al., 2021); every image has the same number of tokens."""

    key_class: ClassVar = IDENTITY
    native: ClassVar[str] = "seen"

    latents: Annotated[int, Gt(0)] = 64
    """Number of learned tokens, which is the number of tokens of an image."""
    layers: Annotated[int, Gt(0)] = 3
    """Number of layers."""
    heads: Annotated[int, Gt(0)] = 8
    """Number of attention heads, a divisor of the decoder's width."""
    ffn_dim: Annotated[int, Gt(0)] | None = None
    """Hidden width of the feed-forward part; 4 times the decoder's width when absent."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[PerceiverConfig]":
        """Returns a small adapter."""
        return (cls(latents=3, layers=2, heads=2),)

    def tokens(self, n: int) -> int:
        """Returns `latents`, for any n."""
        return self.latents

    def check(self, context: AdapterContext) -> None:
        """Raises a ValueError if `heads` does not divide the decoder's width."""
        if context.dim % self.heads:
            raise ValueError(f"perceiver: heads {self.heads} must divide model.dim {context.dim}")

    def build(self, context: AdapterContext) -> "nn.Module":
        from forge_vlm import adapters

        self.check(context)
        sizes: dict[str, Any] = {
            "latents": self.latents,
            "layers": self.layers,
            "heads": self.heads,
            "ffn_dim": 4 * context.dim if self.ffn_dim is None else self.ffn_dim,
        }
        return adapters.PerceiverAdapter(context.width, context.dim, **sizes, std=context.init_std)
