"""How many dimensions activations use, and which neurons never do anything."""

import torch
from torch import Tensor

from forge_models.interp.listing import InterpError


def effective_rank(x: Tensor, center: bool = True) -> Tensor:
    """exp of the entropy of the singular values, as shares of their sum (Roy and Vetterli, 2007); from 1 to the width.

    Args:
        x: (..., width) activations.
        center: without their mean.

    Raises:
        InterpError: nothing varies.
    """
    rows = x.detach().reshape(-1, x.shape[-1]).double()
    sizes = torch.linalg.svdvals(rows - rows.mean(0) if center else rows)
    if not float(sizes.sum()) > 0:
        raise InterpError("all rows are equal; their rank says nothing")
    shares = sizes / sizes.sum()
    return torch.special.entr(shares).sum().exp()


def dead_neurons(hidden: Tensor, threshold: float = 0.0) -> Tensor:
    """(width,) bool: neurons whose absolute value exceeds the threshold for no token of `hidden` (..., width)."""
    return (hidden.detach().abs() <= threshold).reshape(-1, hidden.shape[-1]).all(0)
