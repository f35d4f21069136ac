"""How many dimensions activations use, and which neurons never do anything."""

import torch
from torch import Tensor

from forge_models.interp.listing import InterpError, require_finite
from forge_models.interp.neuro.ridge import standardized


def effective_rank(x: Tensor, center: bool = True) -> Tensor:
    """exp of the entropy of the singular values, as shares of their sum (Roy and Vetterli, 2007); from 1 to the width.

    Args:
        x: (..., width) activations.
        center: without their mean.

    Raises:
        InterpError: nothing varies, or values that are not finite.
    """
    rows = x.detach().reshape(-1, x.shape[-1]).double()
    require_finite("activations", rows)
    sizes = torch.linalg.svdvals(rows - rows.mean(0) if center else rows)
    if not bool((standardized(rows, 0) if center else rows).any()):
        raise InterpError("all rows are equal; their rank says nothing")
    shares = sizes / sizes.sum()
    return torch.special.entr(shares).sum().exp()


def dead_neurons(hidden: Tensor, threshold: float = 0.0) -> Tensor:
    """(width,) bool: neurons whose absolute value exceeds the threshold for no token of `hidden` (..., width)."""
    return (hidden.detach().abs() <= threshold).reshape(-1, hidden.shape[-1]).all(0)
