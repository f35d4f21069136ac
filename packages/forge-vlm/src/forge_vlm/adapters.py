"""Modules that convert image features to tokens of the decoder: projections, pooling of windows, the perceiver.

A projection keeps the number of features. Pooling makes one token of each window of the grid. The perceiver has a fixed number of
learned tokens that attend to all features.
"""

from itertools import pairwise
from math import sqrt

from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.specs import Init, TensorSpec
from forge_models.blocks.layers import LayerNorm, Linear, linear_specs, unfilled
from forge_vlm.context import grid_side
from forge_vlm.encoders.vit import attend

NORM_EPS = 1e-6
"""Epsilon of the perceiver's norms."""


class Projection(nn.Module):
    """Matrices with an exact gelu between them: `hidden` = 0 is a linear map, 1 is the connector of LLaVA-1.5."""

    def __init__(self, inputs: int, outputs: int, *, hidden: int, hidden_dim: int, bias: bool, std: float) -> None:
        super().__init__()
        widths = (inputs, *[hidden_dim] * hidden, outputs)
        self.std = std
        self.layers = nn.ModuleDict({str(at): Linear(*sizes, bias) for at, sizes in enumerate(pairwise(widths))})

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) -> (..., outputs)."""
        for name, layer in self.layers.items():
            x = layer(x if name == "0" else F.gelu(x))
        return x

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Parameters by name relative to this module."""
        specs: dict[str, TensorSpec] = {}
        for name, layer in self.layers.items():
            assert isinstance(layer, Linear)
            specs |= linear_specs(f"layers.{name}", layer, (None, None), self.std)
        return specs


class AveragePoolAdapter(nn.Module):
    """Mean over each window, then a projection. Windows at the right and bottom edges may be smaller than the others."""

    def __init__(self, window: int, projection: Projection) -> None:
        super().__init__()
        self.window = window
        self.projection = projection

    def forward(self, x: Tensor) -> Tensor:
        """(N, n, width) -> (N, ceil(sqrt(n) / window)^2, dim)."""
        grid = grid_side(x.shape[1], "average_pool")
        image = x.transpose(1, 2).unflatten(2, (grid, grid))
        pooled = F.avg_pool2d(image, self.window, ceil_mode=True, count_include_pad=False)
        return self.projection(pooled.flatten(2).transpose(1, 2))


class PixelShuffleAdapter(nn.Module):
    """Concatenation of the features of each window, then a projection (the inverse of Shi et al., 2016; Idefics3, 2024)."""

    def __init__(self, factor: int, projection: Projection) -> None:
        super().__init__()
        self.factor = factor
        self.projection = projection

    def forward(self, x: Tensor) -> Tensor:
        """(N, n, width) -> (N, n / factor^2, dim)."""
        return self.projection(split_windows(x, self.factor).flatten(2))


class AttentionPoolAdapter(nn.Module):
    """Attention within each window, with the mean of the window as query (Molmo, Deitke et al., 2024), then a projection."""

    def __init__(self, width: int, window: int, heads: int, std: float, projection: Projection) -> None:
        super().__init__()
        self.window, self.heads, self.std = window, heads, std
        self.q_proj = Linear(width, width, True)
        self.k_proj = Linear(width, width, True)
        self.v_proj = Linear(width, width, True)
        self.o_proj = Linear(width, width, True)
        self.projection = projection

    def forward(self, x: Tensor) -> Tensor:
        """(N, n, width) -> (N, n / window^2, dim)."""
        cut = split_windows(x, self.window)
        batch, count = cut.shape[:2]
        cut = cut.flatten(0, 1)
        q, k, v = (self._heads(y) for y in (self.q_proj(cut.mean(1, keepdim=True)), self.k_proj(cut), self.v_proj(cut)))
        out = attend(q, k, v)
        return self.projection(self.o_proj(out.transpose(1, 2).flatten(1)).unflatten(0, (batch, count)))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Parameters by name relative to this module, without those of the projection."""
        return {
            **linear_specs("q_proj", self.q_proj, (None, None), self.std),
            **linear_specs("k_proj", self.k_proj, (None, None), self.std),
            **linear_specs("v_proj", self.v_proj, (None, None), self.std),
            **linear_specs("o_proj", self.o_proj, (None, None), self.std),
        }


def split_windows(x: Tensor, size: int) -> Tensor:
    """Splits (N, n, width) into (N, windows, size * size, width): windows, and the features within a window, row by row."""
    rows = grid_side(x.shape[1], "a window") // size
    return x.unflatten(1, (rows, size, rows, size)).transpose(2, 3).flatten(3, 4).flatten(1, 2)


class PerceiverAdapter(nn.Module):
    """Learned latents attend to all features in every layer; a norm follows (Perceiver, Jaegle et al., 2021; as in Flamingo and
    Idefics2). The output does not depend on the order of the features."""

    def __init__(self, width: int, dim: int, *, latents: int, layers: int, heads: int, ffn_dim: int, std: float) -> None:
        super().__init__()
        self.std = std
        self.latents = unfilled(latents, dim)
        self.entry = Projection(width, dim, hidden=0, hidden_dim=dim, bias=True, std=std)
        self.layers = nn.ModuleDict(
            {str(at): PerceiverLayer(dim, heads, ffn_dim, std, std / sqrt(2 * layers)) for at in range(layers)}
        )
        self.norm = LayerNorm(dim, NORM_EPS)

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """(N, n, width) -> (N, latents, dim). `seen` (N, n) is False for padding, which is ignored; None: no padding."""
        mask = None if seen is None else seen[:, None, None]
        features = self.entry(x)
        latents = self.latents.to(features.dtype).expand(len(x), -1, -1)
        for layer in self.layers.values():
            latents = layer(latents, features, mask)
        return self.norm(latents)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Parameters by name relative to this module, without those of its layers."""
        return {"latents": TensorSpec((None, None), Init("normal", 1.0), "embedding")}


class PerceiverLayer(nn.Module):
    """Latents attend to the features, then pass through a feed-forward part; both have a residual connection."""

    def __init__(self, dim: int, heads: int, ffn_dim: int, std: float, output_std: float) -> None:
        super().__init__()
        self.heads, self.std, self.output_std = heads, std, output_std
        self.latent_norm = LayerNorm(dim, NORM_EPS)
        self.feature_norm = LayerNorm(dim, NORM_EPS)
        self.q_proj = Linear(dim, dim)
        self.k_proj = Linear(dim, dim)
        self.v_proj = Linear(dim, dim)
        self.o_proj = Linear(dim, dim)
        self.mlp_norm = LayerNorm(dim, NORM_EPS)
        self.up_proj = Linear(dim, ffn_dim)
        self.down_proj = Linear(ffn_dim, dim)

    def forward(self, latents: Tensor, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Latents (N, m, dim), features (N, n, dim) -> latents (N, m, dim). `mask` (N, 1, 1, n) is False for padding."""
        seen = self.feature_norm(features)
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for y in (self.q_proj(self.latent_norm(latents)), self.k_proj(seen), self.v_proj(seen))
        )
        out = attend(q, k, v, mask)
        latents = latents + self.o_proj(out.transpose(1, 2).flatten(2))
        return latents + self.down_proj(F.gelu(self.up_proj(self.mlp_norm(latents))))

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Parameters by name relative to this module, without those of its norms."""
        specs: dict[str, TensorSpec] = {}
        for name in ("q_proj", "k_proj", "v_proj", "up_proj"):
            specs |= linear_specs(name, getattr(self, name), (None, None), self.std)
        for name in ("o_proj", "down_proj"):
            specs |= linear_specs(name, getattr(self, name), (None, None), self.output_std)
        return specs
