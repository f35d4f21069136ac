"""Encoding models over several feature spaces at once, each with its share of the penalty (Nunez-Elizalde et al., 2019)."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from forge_models.interp.listing import InterpError
from forge_models.interp.neuro.ridge import ALPHAS, Folds, checked, correlations, decade, errors_of, fitted, folds_of, others


class Banded(NamedTuple):
    """y = sum over bands of x_b @ weight_b + bias.

    Attributes:
        weights: by band (features, voxels).
        bias: (voxels,).
        alpha: (voxels,) the chosen penalties.
        shares: (voxels, bands) the chosen shares g: the penalty of a band is alpha u / g, and a band of share 0 is left out.
        units: (bands,) the factor u of each band: 1 for given alphas, else the band's `decade`.
    """

    weights: dict[str, Tensor]
    bias: Tensor
    alpha: Tensor
    shares: Tensor
    units: Tensor

    def predict(self, bands: Mapping[str, Tensor]) -> Tensor:
        """(n, features) of each band -> (n, voxels)."""
        return sum((bands[name].double() @ weight for name, weight in self.weights.items()), self.bias)


class Encoded(NamedTuple):
    """How well rows are predicted that neither weights nor penalties nor shares have seen.

    Attributes:
        r: (voxels,) correlation, averaged over the folds in which a voxel varies; NaN where there is no such fold.
        folds: (folds, voxels) of each fold; NaN where a voxel does not vary.
        alpha: (folds, voxels) the chosen penalties, see `Banded`.
        shares: (voxels, bands) the chosen shares, averaged over folds.
    """

    r: Tensor
    folds: Tensor
    alpha: Tensor
    shares: Tensor


def mixes(bands: int, draws: int = 20, seed: int = 0) -> Tensor:
    """(candidates, bands) shares that sum to 1: each band alone, all alike, and `draws` from a flat Dirichlet distribution (Dupre
    la Tour et al., 2022). Of one band there is one."""
    if bands == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    even = torch.full((1, bands), 1 / bands, dtype=torch.float64)
    uniform = torch.rand(draws, bands, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    drawn = -torch.log1p(-uniform)  # exponential variables over their sum
    return torch.cat([torch.eye(bands, dtype=torch.float64), even, drawn / drawn.sum(1, keepdim=True)])


def banded_ridge(
    bands: Mapping[str, Tensor],
    y: Tensor,
    *,
    shares: Tensor | None = None,
    alphas: Sequence[float] | None = None,
    folds: Folds = 5,
) -> Banded:
    """Minimizes |y - sum x_b w_b - c|^2 + alpha sum u_b |w_b|^2 / g_b for each voxel; alpha and the shares g are those of least
    held-out error.

    With x_b sqrt(g_b / u_b) in the place of x_b it is a ridge regression. The factor u_b is 1 where alphas are given, and by
    default the `decade` of the band, so that no band's units matter.

    Args:
        bands: by name (n, features).
        y: (n, voxels) of the same times.
        shares: (candidates, bands), see `mixes`, which is the default.
        alphas: penalties that are tried; None = `ALPHAS`, times the `decade` of each band.

    Raises:
        InterpError: no bands, or rows, shares, alphas or values with which nothing can be fitted.
    """
    if not bands:
        raise InterpError("bands is empty; give at least one band")
    pairs = [checked(x, y) for x in bands.values()]
    parts, y = [x for x, _ in pairs], pairs[0][1]
    candidates = mixes(len(parts)) if shares is None else shares.double()
    if candidates.dim() != 2 or candidates.shape[1] != len(parts) or bool((candidates < 0).any()):
        raise InterpError(f"shares {tuple(candidates.shape)} must be (candidates, {len(parts)} bands) and not negative")
    if not bool((candidates.sum(1) > 0).all()):
        raise InterpError("shares of a candidate are all 0, which leaves out every band")
    units = torch.tensor([1.0 if alphas is not None else decade(x) for x in parts], dtype=torch.float64)
    alphas = ALPHAS if alphas is None else alphas
    weighted = candidates / units
    errors = torch.stack([errors_of(_scaled(parts, one), y, alphas, folds) for one in weighted])  # (mixes, alphas, voxels)
    best = errors.flatten(0, 1).argmin(0)
    mix, alpha = best // len(alphas), torch.tensor(alphas, dtype=torch.float64)[best % len(alphas)]
    widths = [x.shape[1] for x in parts]
    weight, bias = y.new_empty(sum(widths), y.shape[1]), y.new_empty(y.shape[1])
    for number in mix.unique().tolist():
        here, scale = mix == number, _scales(weighted[number], widths)
        found = fitted(_scaled(parts, weighted[number]), y[:, here], alpha[here], errors[number][:, here])
        weight[:, here], bias[here] = found.weight * scale[:, None], found.bias
    return Banded(dict(zip(bands, weight.split(widths), strict=True)), bias, alpha, candidates[mix], units)


def encode_banded(
    bands: Mapping[str, Tensor],
    y: Tensor,
    *,
    shares: Tensor | None = None,
    alphas: Sequence[float] | None = None,
    folds: int = 5,
    inner: Folds | None = None,
) -> Encoded:
    """Predicts each of `folds` contiguous parts of a recording from the others.

    Args:
        inner: how penalties and shares are chosen within the others; None = by `folds` folds.

    Raises:
        InterpError: as `banded_ridge`, or rows that are too few for the folds.
    """
    scores, alpha, chosen = [], [], []
    for rows in folds_of(len(y), folds):
        inside = others(len(y), rows)
        seen = {name: x[inside] for name, x in bands.items()}
        found = banded_ridge(seen, y[inside], shares=shares, alphas=alphas, folds=folds if inner is None else inner)
        scores.append(correlations(found.predict({name: x[rows] for name, x in bands.items()}), y[rows]))
        alpha.append(found.alpha)
        chosen.append(found.shares)
    per_fold = torch.stack(scores)
    return Encoded(per_fold.nanmean(0), per_fold, torch.stack(alpha), torch.stack(chosen).mean(0))


def _scaled(parts: Sequence[Tensor], shares: Tensor) -> Tensor:
    return torch.cat([x * share.sqrt() for x, share in zip(parts, shares, strict=True)], 1)


def _scales(shares: Tensor, widths: Sequence[int]) -> Tensor:
    return torch.cat([share.sqrt().expand(width) for share, width in zip(shares, widths, strict=True)])
