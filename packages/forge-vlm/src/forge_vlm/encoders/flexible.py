"""Images of any proportions in one batch (NaFlex, Tschannen et al., 2025): padding, and positions for each image's own grid.

Grids are tensors on the device: nothing waits for them, and shapes do not depend on them.
"""

from math import isqrt

import torch
from torch import Tensor


def present(grids: Tensor, length: int) -> Tensor:
    """(N, 2) rows and columns -> (N, length) bool, True for patches. An image without any has one: attention stays finite."""
    return torch.arange(length, device=grids.device) < grids.prod(1, keepdim=True).clamp(min=1)


def resized(table: Tensor, grids: Tensor, length: int) -> Tensor:
    """A square table of positions (g * g, dim) -> (N, length, dim), for the grid of each image, row by row.

    As bilinear interpolation with antialiasing makes it, which is a weighted sum of the table; padding has the last row's.
    """
    side = isqrt(len(table))
    token = torch.arange(length, device=grids.device)
    rows, columns = grids.clamp(min=1).unbind(1)
    down = _weights(token // columns[:, None], rows, side)
    across = _weights(token % columns[:, None], columns, side)
    return ((down[..., None] * across[..., None, :]).flatten(2).to(table.dtype) @ table).to(table.dtype)


def _weights(index: Tensor, count: Tensor, side: int) -> Tensor:
    """Of `side` values in the one at `index` (N, T) of `count` (N,) values: (N, T, side) fp32, a triangle around its center that
    is as wide as the coarser of both spacings."""
    scale = (side / count.float())[:, None, None]
    center = (torch.minimum(index, count[:, None] - 1)[..., None] + 0.5) * scale
    distance = (torch.arange(side, device=index.device) + 0.5 - center).abs()
    weights = (1 - distance / scale.clamp(min=1)).clamp(min=0)
    return weights / weights.sum(-1, keepdim=True)
