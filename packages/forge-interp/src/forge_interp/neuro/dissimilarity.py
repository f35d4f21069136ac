"""Representational dissimilarity matrices and their agreement, with bootstrap intervals (Kriegeskorte et al., 2008)."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from forge_interp.neuro.encoding import standardized
from forge_interp.tap_names import InterpError, require_finite

Distance = Literal["correlation", "euclidean"]


class Agreement(NamedTuple):
    """Spearman correlation of two RDMs, and the 95 % interval of its bootstrap over conditions."""

    correlation: float
    low: float
    high: float


def rdm(x: Tensor, distance: Distance = "correlation") -> Tensor:
    """Returns (n, n) fp64 distances of n conditions (n, width): 1 - Pearson correlation, or squared Euclidean distance / width.

    Raises:
        InterpError: there are fewer than three conditions, a condition has no variance, or values are not finite.
    """
    rows = x.detach().double()
    if rows.dim() != 2 or len(rows) < 3:
        raise InterpError(f"an RDM needs (n, width) of three conditions at least, not {tuple(rows.shape)}")
    require_finite("conditions", rows)
    if distance == "euclidean":
        return (rows[:, None] - rows[None]).square().mean(2)
    rows = standardized(rows, 1)
    if not bool((varies := rows.any(1)).all()):
        raise InterpError(
            f"condition {int((~varies).nonzero()[0])} has the same value everywhere, so it correlates with nothing; "
            "take distance 'euclidean'"
        )
    return 1 - rows @ rows.T


def rdm_correlation(left: Tensor, right: Tensor, *, samples: int = 1000, seed: int = 0) -> Agreement:
    """Returns the Spearman correlation, with averaged ties, of the upper triangles of two RDMs (n, n).

    A bootstrap sample draws conditions with replacement, the same for both RDMs; pairs of a condition with itself are left out
    (Nili et al., 2014).

    Raises:
        InterpError: the shapes of the matrices differ, all distances of one are equal, or a distance is not finite.
    """
    if left.shape != right.shape or left.dim() != 2 or left.shape[0] != left.shape[1] or len(left) < 3:
        raise InterpError(f"RDMs {tuple(left.shape)} and {tuple(right.shape)} are not (n, n) of the same conditions")
    require_finite("the first RDM's rows", left)
    require_finite("the second RDM's rows", right)
    count = len(left)
    upper = torch.triu_indices(count, count, 1)
    distances = [one[upper[0], upper[1]] for one in (left, right)]
    found = _spearman(*distances)
    if found is None or not all(bool(standardized(one, 0).any()) for one in distances):
        raise InterpError("all distances of an RDM are equal; it correlates with nothing")
    generator, drawn = torch.Generator().manual_seed(seed), []
    for _ in range(samples):
        chosen = torch.randint(count, (count,), generator=generator)
        a, b = chosen[upper[0]], chosen[upper[1]]
        different = a != b
        one = _spearman(left[a, b][different], right[a, b][different])
        drawn += [] if one is None else [one]
    if not drawn:
        return Agreement(found, float("nan"), float("nan"))
    low, high = torch.tensor(drawn, dtype=torch.float64).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Agreement(found, low, high)


def _spearman(a: Tensor, b: Tensor) -> float | None:
    if len(a) < 2:
        return None
    ranks = [_ranks(one) for one in (a, b)]
    ranks = [one - one.mean() for one in ranks]
    below = ranks[0].norm() * ranks[1].norm()
    return float((ranks[0] @ ranks[1]) / below) if float(below) > 0 else None


def _ranks(x: Tensor) -> Tensor:
    """Returns ranks from 1; equal values get the mean of their ranks."""
    _, place, counts = x.double().unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[place]
