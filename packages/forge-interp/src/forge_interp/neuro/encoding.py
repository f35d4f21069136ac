"""Encoding models: ridge regression from activations to recordings, with a penalty for each voxel.

Banded ridge fits several feature spaces at once, each with its share of the penalty (Nunez-Elizalde et al., 2019).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from forge_interp.tap_names import InterpError, require_finite

ALPHAS = tuple(10.0**power for power in range(-2, 7))
"""Penalties that are tried for features whose variance is about 1; see `decade`."""

Folds = int | Sequence[Tensor] | Literal["leave_one_out"]
"""How many contiguous folds, the held-out rows of each, or each row by itself, which costs one decomposition in all."""


class Ridge(NamedTuple):
    """y = x @ weight + bias, the penalty of each voxel chosen by cross-validation.

    Attributes:
        weight: (features, voxels).
        bias: (voxels,).
        alpha: (voxels,) the chosen penalties, in the units of x^2.
        errors: (alphas, voxels) mean squared error of held-out rows, averaged over folds, in the units of y^2.
    """

    weight: Tensor
    bias: Tensor
    alpha: Tensor
    errors: Tensor

    def predict(self, x: Tensor) -> Tensor:
        """(n, features) -> (n, voxels)."""
        return x.double() @ self.weight + self.bias


def folds_of(rows: int, folds: int) -> list[Tensor]:
    """Indices of each held-out fold: contiguous, as neighbors in time are alike; sizes differ by one at most.

    Raises:
        InterpError: fewer than two folds, or than two rows in one.
    """
    if folds < 2 or rows < 2 * folds:
        raise InterpError(f"{rows} rows cannot make {folds} folds of at least two rows; use 2 to {max(rows // 2, 2)} folds")
    return list(torch.arange(rows).tensor_split(folds))


def decade(x: Tensor) -> float:
    """The power of ten nearest to the mean variance of the features (n, features); 1 where nothing varies.

    A penalty has the units of x^2. The default penalties are `ALPHAS` times this number, so a fit does not depend on the units
    of its features.
    """
    variance = float(x.double().var(0, correction=0).mean())
    return 10.0 ** round(math.log10(variance)) if variance > 0 else 1.0


def ridge(x: Tensor, y: Tensor, *, alphas: Sequence[float] | None = None, folds: Folds = 5) -> Ridge:
    """Minimizes |y - x w - b|^2 + alpha |w|^2 for each voxel (Hoerl and Kennard, 1970), with the alpha of least held-out error.

    One decomposition of each fold serves all penalties and voxels: with x = U S V', w = V S / (S^2 + alpha) U' y. Where each row
    is held out, the one of all rows does: the error is that of the fit divided by 1 - h, h the row's own part in its prediction
    (Allen, 1974).

    Args:
        x: (n, features).
        y: (n, voxels) of the same times.
        alphas: penalties that are tried; None = `ALPHAS` times the `decade` of x.
        folds: see `Folds`; held-out rows that are listed must be rows of x, not empty and not all of them.

    Raises:
        InterpError: rows or folds that do not fit, values that are not finite, or penalties that are not positive.
    """
    x, y = checked(x, y)
    alphas = [alpha * decade(x) for alpha in ALPHAS] if alphas is None else alphas
    errors = errors_of(x, y, alphas, folds)
    return fitted(x, y, torch.tensor(alphas, dtype=torch.float64)[errors.argmin(0)], errors)


def errors_of(x: Tensor, y: Tensor, alphas: Sequence[float], folds: Folds) -> Tensor:
    """(alphas, voxels) mean squared error of held-out rows, averaged over folds; of `checked` x and y."""
    if not alphas or min(alphas) <= 0:
        raise InterpError("alphas must be positive, and at least one")
    if folds == "leave_one_out":
        return _row_errors(x, y, alphas)
    held_out = folds_of(len(x), folds) if isinstance(folds, int) else _listed(folds, len(x))
    return torch.stack([_fold_errors(x, y, rows, alphas) for rows in held_out]).mean(0)


def fitted(x: Tensor, y: Tensor, penalties: Tensor, errors: Tensor) -> Ridge:
    """With penalties (voxels,) that were chosen by `errors`."""
    left, sizes, right, y_mean, x_mean = _decomposed(x, y)
    weight = right.T @ (left * (sizes[:, None] / (sizes[:, None].square() + penalties)))
    return Ridge(weight, y_mean - x_mean @ weight, penalties, errors)


def encode(x: Tensor, y: Tensor, *, alphas: Sequence[float] | None = None, folds: int = 5) -> Tensor:
    """(voxels,) correlation of predicted and recorded rows that neither weights nor penalties have seen, averaged over folds.

    In each outer fold, penalties are chosen by `folds` inner ones. Folds in which a voxel does not vary are left out of its mean;
    a voxel that never varies has NaN.
    """
    x, y = checked(x, y)
    scores = []
    for rows in folds_of(len(x), folds):
        inside = others(len(x), rows)
        found = ridge(x[inside], y[inside], alphas=alphas, folds=folds)
        scores.append(correlations(found.predict(x[rows]), y[rows]))
    return torch.stack(scores).nanmean(0)


def correlations(predicted: Tensor, recorded: Tensor) -> Tensor:
    """(columns,) Pearson correlations over rows: NaN where `recorded` does not vary, 0 where only `predicted` does not.

    Columns may have any units.
    """
    predicted, recorded = standardized(predicted, 0), standardized(recorded, 0)
    return torch.where(recorded.any(0), (predicted * recorded).sum(0), float("nan"))


def standardized(x: Tensor, dim: int) -> Tensor:
    """x in fp64 without its mean along `dim` and of norm 1; zeros where it does not vary.

    Whether it varies is judged relative to its own size, which depends on units: what is left of equal values after their mean
    is taken away is rounding, below n eps max|x|.
    """
    x = x.double()
    largest = x.abs().amax(dim, keepdim=True)
    x = x / torch.where(largest > 0, largest, 1.0)  # squares of 1e-170 would be 0
    x = x - x.mean(dim, keepdim=True)
    norms = x.norm(dim=dim, keepdim=True)
    varies = norms > x.shape[dim] * torch.finfo(torch.float64).eps
    return torch.where(varies, x / torch.where(varies, norms, 1.0), 0.0)


def noise_ceiling(repeats: Tensor) -> Tensor:
    """(voxels,) correlation that a perfect model of the signal would reach with the mean of `repeats` (k, n, voxels) (Schoppe et
    al., 2016): sqrt of the share of the mean's variance that is not noise; 0 where all is noise, or nothing varies.

    Raises:
        InterpError: fewer than two repeats, or values that are not finite.
    """
    if len(repeats) < 2:
        raise InterpError(f"a noise ceiling needs two recordings of the same rows, and there is {len(repeats)}")
    require_finite("repeats", repeats.flatten(0, 1))
    repeats = repeats.double()
    largest = repeats.abs().amax((0, 1))
    repeats = repeats / torch.where(largest > 0, largest, 1.0)
    noise = repeats.var(0).mean(0) / len(repeats)
    whole = repeats.mean(0).var(0)
    varies = standardized(repeats.mean(0), 0).any(0)
    return torch.where(varies, ((whole - noise) / torch.where(varies, whole, 1.0)).clamp(min=0).sqrt(), 0.0)


def normalized(r: Tensor, ceiling: Tensor, least: float = 0.1) -> Tensor:
    """(voxels,) r / ceiling; NaN where the ceiling is below `least`: nothing there can be predicted, and a quotient is noise."""
    return torch.where(ceiling >= least, r / ceiling.clamp(min=1e-12), float("nan"))


def lagged(x: Tensor, lags: Sequence[int]) -> Tensor:
    """(n, features * lags): the rows of some steps before, side by side, zeros before the first: a recording follows with delay.

    Raises:
        InterpError: a lag that looks ahead, or beyond the rows.
    """
    if wrong := [lag for lag in lags if not 0 <= lag < len(x)]:
        raise InterpError(f"lag {wrong[0]}: lags are 0 to {len(x) - 1} rows")
    return torch.cat([torch.cat([x.new_zeros(lag, x.shape[1]), x[: len(x) - lag]]) for lag in lags], 1)


def _listed(folds: Sequence[Tensor], rows: int) -> list[Tensor]:
    """Held-out rows that were given, checked."""
    if not folds:
        raise InterpError("folds is empty; list the held-out rows of at least one fold, or give a number of folds")
    for number, fold in enumerate(folds):
        held_out = fold.nonzero().flatten() if fold.dtype == torch.bool else fold
        if not 0 < len(held_out.unique()) < rows or int(held_out.min()) < 0 or int(held_out.max()) >= rows:
            raise InterpError(
                f"fold {number} holds out {len(held_out)} rows; each fold needs one of the rows 0 to {rows - 1} at least, not all"
            )
    return list(folds)


def _row_errors(x: Tensor, y: Tensor, alphas: Sequence[float]) -> Tensor:
    """Of each row, predicted by all others."""
    left, sizes, right, y_mean, x_mean = _decomposed(x, y)
    base = ((x - x_mean) @ right.T) / sizes
    errors = []
    for alpha in alphas:
        kept = sizes.square() / (sizes.square() + alpha)
        own = base.square() @ kept + 1 / len(x)  # the mean has each row in it, too
        missed = y - y_mean - (base * kept) @ left
        errors.append((missed / (1 - own)[:, None]).square().mean(0))
    return torch.stack(errors)


def _fold_errors(x: Tensor, y: Tensor, rows: Tensor, alphas: Sequence[float]) -> Tensor:
    inside = others(len(x), rows)
    left, sizes, right, y_mean, x_mean = _decomposed(x[inside], y[inside])
    scores = (x[rows] - x_mean) @ right.T
    errors = []
    for alpha in alphas:
        predicted = (scores * (sizes / (sizes.square() + alpha))) @ left + y_mean
        errors.append((predicted - y[rows]).square().mean(0))
    return torch.stack(errors)


def _decomposed(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """U'y, S, V', and the means, which are not penalized. By the products of the shorter side: a decomposition of all of x takes
    several times as long, and what its smaller singular values tell more is below every penalty."""
    x_mean, y_mean = x.mean(0), y.mean(0)
    x, y = x - x_mean, y - y_mean
    wide = len(x) < x.shape[1]
    squares, vectors = torch.linalg.eigh(x @ x.T if wide else x.T @ x)
    kept = squares > squares[-1].clamp(min=1e-300) * max(x.shape) * torch.finfo(torch.float64).eps
    sizes, vectors = squares[kept].sqrt(), vectors[:, kept]
    if wide:
        return vectors.T @ y, sizes, (vectors.T @ x) / sizes[:, None], y_mean, x_mean
    return (vectors.T @ (x.T @ y)) / sizes[:, None], sizes, vectors.T, y_mean, x_mean


def others(count: int, rows: Tensor) -> Tensor:
    """(count,) bool: all but some rows."""
    mask = torch.ones(count, dtype=torch.bool)
    mask[rows] = False
    return mask


def checked(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Both in fp64.

    Raises:
        InterpError: rows that do not fit, or values that are not finite.
    """
    if x.dim() != 2 or y.dim() != 2 or len(x) != len(y):
        raise InterpError(f"features {tuple(x.shape)} and recordings {tuple(y.shape)} are (n, ...) of the same n times")
    require_finite("features", x)
    require_finite("recordings", y)
    return x.detach().double(), y.detach().double()


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


class EncodingScores(NamedTuple):
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
) -> EncodingScores:
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
    return EncodingScores(per_fold.nanmean(0), per_fold, torch.stack(alpha), torch.stack(chosen).mean(0))


def _scaled(parts: Sequence[Tensor], shares: Tensor) -> Tensor:
    return torch.cat([x * share.sqrt() for x, share in zip(parts, shares, strict=True)], 1)


def _scales(shares: Tensor, widths: Sequence[int]) -> Tensor:
    return torch.cat([share.sqrt().expand(width) for share, width in zip(shares, widths, strict=True)])
