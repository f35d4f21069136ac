"""Fewer tokens: what lies in one window of the grid becomes one token."""

from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.specs import TensorSpec
from forge_models.blocks.layers import Linear, linear_specs
from forge_vlm.adapters.grid import side
from forge_vlm.adapters.projection import Projection
from forge_vlm.encoders.layers import attend


class AveragePool(nn.Module):
    """The mean of each window, then a projection. Where windows do not fit, those at the right and at the bottom are smaller."""

    def __init__(self, window: int, projection: Projection) -> None:
        super().__init__()
        self.window = window
        self.projection = projection

    def forward(self, x: Tensor) -> Tensor:
        """(N, n, width) -> (N, ceil(sqrt(n) / window)^2, dim)."""
        grid = side(x.shape[1], "average_pool")
        image = x.transpose(1, 2).unflatten(2, (grid, grid))
        pooled = F.avg_pool2d(image, self.window, ceil_mode=True, count_include_pad=False)
        return self.projection(pooled.flatten(2).transpose(1, 2))


class PixelShuffle(nn.Module):
    """The features of each window side by side, then a projection (Shi et al., 2016, the other way around; Idefics3, 2024)."""

    def __init__(self, factor: int, projection: Projection) -> None:
        super().__init__()
        self.factor = factor
        self.projection = projection

    def forward(self, x: Tensor) -> Tensor:
        """(N, n, width) -> (N, n / factor^2, dim)."""
        return self.projection(in_windows(x, self.factor).flatten(2))


class AttentionPool(nn.Module):
    """Attention inside of each window whose query is the window's mean (Molmo, Deitke et al., 2024), then a projection."""

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
        cut = in_windows(x, self.window)
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


def in_windows(x: Tensor, size: int) -> Tensor:
    """(N, n, width) -> (N, windows, size * size, width): windows row by row, in each its features row by row."""
    rows = side(x.shape[1], "a window") // size
    return x.unflatten(1, (rows, size, rows, size)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
