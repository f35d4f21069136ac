"""Encoding models: ridge regression from activations to recordings, with one penalty per voxel.

Banded ridge fits several feature spaces at once, each with its own share of the penalty (Nunez-Elizalde et al., 2019).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from forge_interp.tap_names import InterpError, require_finite

ALPHAS = tuple(10.0**power for power in range(-2, 7))
"""Candidate penalties for features with a variance of about 1; see `decade`."""

Folds = int | Sequence[Tensor] | Literal["leave_one_out"]
"""Number of contiguous folds, the held-out rows of each fold, or leave-one-out, which needs only one decomposition."""


class Ridge(NamedTuple):
    """y = x @ weight + bias, with the penalty of each voxel chosen by cross-validation.

    Attributes:
        weight: (features, voxels) weights.
        bias: (voxels,) biases.
        alpha: (voxels,) chosen penalties, in the units of x^2.
        errors: (alphas, voxels) mean squared error of held-out rows, averaged over folds, in the units of y^2.
    """

    weight: Tensor
    bias: Tensor
    alpha: Tensor
    errors: Tensor

    def predict(self, x: Tensor) -> Tensor:
        """Predicts (n, voxels) from (n, features)."""
        return x.double() @ self.weight + self.bias


def folds_of(rows: int, folds: int) -> list[Tensor]:
    """Returns the row indices of each held-out fold. Folds are contiguous, because neighbors in time are similar; their sizes
    differ by at most one.

    Raises:
        InterpError: there are fewer than two folds, or a fold has fewer than two rows.
    """
    if folds < 2 or rows < 2 * folds:
        raise InterpError(f"{rows} rows cannot make {folds} folds of at least two rows; use 2 to {max(rows // 2, 2)} folds")
    return list(torch.arange(rows).tensor_split(folds))


def decade(x: Tensor) -> float:
    """Returns the power of ten nearest to the mean variance of the features (n, features), or 1 if they do not vary.

    A penalty has the units of x^2. The default penalties are `ALPHAS` times this number, so that a fit does not depend on the
    units of the features.
    """
    variance = float(x.double().var(0, correction=0).mean())
    return 10.0 ** round(math.log10(variance)) if variance > 0 else 1.0


def ridge(x: Tensor, y: Tensor, *, alphas: Sequence[float] | None = None, folds: Folds = 5) -> Ridge:
    """Minimizes |y - x w - b|^2 + alpha |w|^2 for each voxel (Hoerl and Kennard, 1970), with the alpha of lowest held-out error.

    One decomposition per fold serves all penalties and voxels: with x = U S V', w = V S / (S^2 + alpha) U' y. Leave-one-out needs
    only the decomposition of all rows: the held-out error is the residual of the fit divided by 1 - h, where h is the leverage of
    the row (Allen, 1974).

    Args:
        x: (n, features) features.
        y: (n, voxels) recordings at the same times.
        alphas: candidate penalties; None = `ALPHAS` times the `decade` of x.
        folds: see `Folds`; a list of held-out rows must be rows of x, at least one and not all of them.

    Raises:
        InterpError: the shapes of x and y or the folds do not fit, values are not finite, or penalties are not positive.
    """
    x, y = checked(x, y)
    alphas = [alpha * decade(x) for alpha in ALPHAS] if alphas is None else alphas
    errors = errors_of(x, y, alphas, folds)
    return fitted(x, y, torch.tensor(alphas, dtype=torch.float64)[errors.argmin(0)], errors)


def errors_of(x: Tensor, y: Tensor, alphas: Sequence[float], folds: Folds) -> Tensor:
    """Returns the (alphas, voxels) mean squared error of held-out rows, averaged over folds. x and y must be `checked`."""
    if not alphas or min(alphas) <= 0:
        raise InterpError("alphas must be positive, and at least one")
    if folds == "leave_one_out":
        return _row_errors(x, y, alphas)
    held_out = folds_of(len(x), folds) if isinstance(folds, int) else _listed(folds, len(x))
    return torch.stack([_fold_errors(x, y, rows, alphas) for rows in held_out]).mean(0)


def fitted(x: Tensor, y: Tensor, penalties: Tensor, errors: Tensor) -> Ridge:
    """Fits a ridge regression with the given penalties (voxels,), which were chosen by `errors`."""
    left, sizes, right, y_mean, x_mean = _decomposed(x, y)
    weight = right.T @ (left * (sizes[:, None] / (sizes[:, None].square() + penalties)))
    return Ridge(weight, y_mean - x_mean @ weight, penalties, errors)


def encode(x: Tensor, y: Tensor, *, alphas: Sequence[float] | None = None, folds: int = 5) -> Tensor:
    """Returns the (voxels,) correlation of predicted and recorded held-out rows, averaged over folds.

    Cross-validation is nested: in each outer fold, `folds` inner folds choose the penalties. Folds in which a voxel is constant
    are left out of its mean; a voxel that is constant in all folds has NaN.
    """
    x, y = checked(x, y)
    scores = []
    for rows in folds_of(len(x), folds):
        inside = others(len(x), rows)
        found = ridge(x[inside], y[inside], alphas=alphas, folds=folds)
        scores.append(correlations(found.predict(x[rows]), y[rows]))
    return torch.stack(scores).nanmean(0)


def correlations(predicted: Tensor, recorded: Tensor) -> Tensor:
    """Returns (columns,) Pearson correlations over rows: NaN if `recorded` is constant, 0 if only `predicted` is constant.

    Columns may have any units.
    """
    predicted, recorded = standardized(predicted, 0), standardized(recorded, 0)
    return torch.where(recorded.any(0), (predicted * recorded).sum(0), float("nan"))


def standardized(x: Tensor, dim: int) -> Tensor:
    """Returns x in fp64, centered along `dim` and scaled to norm 1; zeros if x is constant along `dim`.

    The test for a constant is relative to max|x|, so it does not depend on units: centering equal values leaves rounding errors
    below n eps max|x|.
    """
    x = x.double()
    largest = x.abs().amax(dim, keepdim=True)
    x = x / torch.where(largest > 0, largest, 1.0)  # prevents underflow: the square of 1e-170 is 0
    x = x - x.mean(dim, keepdim=True)
    norms = x.norm(dim=dim, keepdim=True)
    varies = norms > x.shape[dim] * torch.finfo(torch.float64).eps
    return torch.where(varies, x / torch.where(varies, norms, 1.0), 0.0)


def noise_ceiling(repeats: Tensor) -> Tensor:
    """Returns the (voxels,) correlation of a perfect model of the signal with the mean of `repeats` (k, n, voxels) (Schoppe et
    al., 2016): the square root of the fraction of the mean's variance that is signal; 0 if there is only noise, or no variance.

    Raises:
        InterpError: there are fewer than two repeats, or values are not finite.
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
    """Returns (voxels,) r / ceiling, or NaN if the ceiling is below `least`, because the quotient would be noise."""
    return torch.where(ceiling >= least, r / ceiling.clamp(min=1e-12), float("nan"))


def lagged(x: Tensor, lags: Sequence[int]) -> Tensor:
    """Returns (n, features * lags): copies of x delayed by each lag, concatenated, with zeros before the first row. A recording
    follows its stimulus with a delay.

    Raises:
        InterpError: a lag is negative, or not smaller than the number of rows.
    """
    if wrong := [lag for lag in lags if not 0 <= lag < len(x)]:
        raise InterpError(f"lag {wrong[0]}: lags are 0 to {len(x) - 1} rows")
    return torch.cat([torch.cat([x.new_zeros(lag, x.shape[1]), x[: len(x) - lag]]) for lag in lags], 1)


def _listed(folds: Sequence[Tensor], rows: int) -> list[Tensor]:
    """Returns the listed folds after checking their rows."""
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
    """Returns the (alphas, voxels) mean squared error of leave-one-out prediction."""
    left, sizes, right, y_mean, x_mean = _decomposed(x, y)
    base = ((x - x_mean) @ right.T) / sizes
    errors = []
    for alpha in alphas:
        kept = sizes.square() / (sizes.square() + alpha)
        own = base.square() @ kept + 1 / len(x)  # leverage of each row; 1 / n is its part in the mean
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
    """Returns U'y, S, V', and the means of y and x, which are not penalized.

    Decomposes the Gram matrix of the shorter side, which is several times faster than an SVD of x. The lost precision concerns
    singular values that are negligible compared with every penalty.
    """
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
    """Returns a (count,) bool mask of all rows except `rows`."""
    mask = torch.ones(count, dtype=torch.bool)
    mask[rows] = False
    return mask


def checked(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x and y in fp64.

    Raises:
        InterpError: x and y differ in their number of rows or are not matrices, or values are not finite.
    """
    if x.dim() != 2 or y.dim() != 2 or len(x) != len(y):
        raise InterpError(f"features {tuple(x.shape)} and recordings {tuple(y.shape)} are (n, ...) of the same n times")
    require_finite("features", x)
    require_finite("recordings", y)
    return x.detach().double(), y.detach().double()


class Banded(NamedTuple):
    """y = sum over bands of x_b @ weight_b + bias.

    Attributes:
        weights: (features, voxels) weights by band.
        bias: (voxels,) biases.
        alpha: (voxels,) chosen penalties.
        shares: (voxels, bands) chosen shares g: the penalty of a band is alpha u / g, and a band of share 0 is left out.
        units: (bands,) factor u of each band: 1 if alphas were given, else the band's `decade`.
    """

    weights: dict[str, Tensor]
    bias: Tensor
    alpha: Tensor
    shares: Tensor
    units: Tensor

    def predict(self, bands: Mapping[str, Tensor]) -> Tensor:
        """Predicts (n, voxels) from the (n, features) of each band."""
        return sum((bands[name].double() @ weight for name, weight in self.weights.items()), self.bias)


class EncodingScores(NamedTuple):
    """Scores of predictions of held-out rows, which were not used for weights, penalties or shares.

    Attributes:
        r: (voxels,) correlation, averaged over the folds in which a voxel varies; NaN if there is no such fold.
        folds: (folds, voxels) correlation in each fold; NaN if a voxel is constant.
        alpha: (folds, voxels) chosen penalties, see `Banded`.
        shares: (voxels, bands) chosen shares, averaged over folds.
    """

    r: Tensor
    folds: Tensor
    alpha: Tensor
    shares: Tensor


def mixes(bands: int, draws: int = 20, seed: int = 0) -> Tensor:
    """Returns (candidates, bands) shares that sum to 1: each band alone, equal shares, and `draws` from a flat Dirichlet
    distribution (Dupre la Tour et al., 2022). One band has a single candidate."""
    if bands == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    even = torch.full((1, bands), 1 / bands, dtype=torch.float64)
    uniform = torch.rand(draws, bands, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    drawn = -torch.log1p(-uniform)  # normalized exponential variables have a flat Dirichlet distribution
    return torch.cat([torch.eye(bands, dtype=torch.float64), even, drawn / drawn.sum(1, keepdim=True)])


def banded_ridge(
    bands: Mapping[str, Tensor],
    y: Tensor,
    *,
    shares: Tensor | None = None,
    alphas: Sequence[float] | None = None,
    folds: Folds = 5,
) -> Banded:
    """Minimizes |y - sum x_b w_b - c|^2 + alpha sum u_b |w_b|^2 / g_b for each voxel, with the alpha and the shares g of lowest
    held-out error.

    It is a ridge regression on x_b sqrt(g_b / u_b). The factor u_b is 1 if alphas are given, else the `decade` of the band, so
    that the result does not depend on the units of the bands.

    Args:
        bands: (n, features) features by name.
        y: (n, voxels) recordings at the same times.
        shares: (candidates, bands) candidate shares; by default `mixes`.
        alphas: candidate penalties; None = `ALPHAS`, times the `decade` of each band.
        folds: see `Folds`.

    Raises:
        InterpError: there are no bands, or the shapes, shares, alphas or values are invalid.
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
        inner: folds within the other parts, which choose penalties and shares; None = `folds` folds.

    Raises:
        InterpError: the arguments are invalid (see `banded_ridge`), or there are too few rows for the folds.
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
