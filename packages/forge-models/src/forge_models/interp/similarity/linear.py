"""Measures that follow from `Moments` exactly: CKA, CCA, SVCCA, Procrustes, RSA of squared distances.

All are scalars in fp64. X and Y are the rows without their means, K = XX' and L = YY'.
"""

import torch
from torch import Tensor

from forge_models.interp.listing import InterpError
from forge_models.interp.similarity.kernel import ROUNDING
from forge_models.interp.similarity.moments import Moments


def cka(moments: Moments) -> Tensor:
    """|X'Y|^2 / (|X'X| |Y'Y|), Frobenius norms (Kornblith et al., 2019). Biased: for few rows it is large for any pair.

    Raises:
        InterpError: one side does not vary.
    """
    xx, yy, xy = moments.covariances()
    below = xx.norm() * yy.norm()
    _refuse_constant(moments, xx, yy)
    return xy.square().sum() / below


def unbiased_cka(moments: Moments) -> Tensor:
    """HSIC1(K, L) / sqrt(HSIC1(K, K) HSIC1(L, L)) (Song et al., 2012; Nguyen et al., 2021); about 0 for independent rows.

    HSIC1 = [tr(K~L~) + 1'K~1 1'L~1 / ((n - 1)(n - 2)) - 2 / (n - 2) 1'K~L~1] / (n (n - 3)), K~ being K without its diagonal.

    Raises:
        InterpError: fewer than 4 rows, or one side does not vary, or its rows are equidistant: then its HSIC1 is 0.
    """
    if float(moments.n) < 4:
        raise InterpError(f"unbiased CKA needs 4 rows, and there are {int(moments.n)}")
    _refuse_constant(moments, *moments.covariances()[:2])
    left, right = _paired(moments), _paired(moments.swapped())
    own = (hsic1(left), hsic1(right))
    for name, one, found in (("x", left, own[0]), ("y", right, own[1])):
        if not float(found) > ROUNDING * float(one.xx.square().sum() / one.n**2):
            raise InterpError(
                f"unbiased CKA is not defined for {name}: its HSIC with itself is not positive, as for rows that all have "
                "the same distance from each other; take biased_cka, or more rows"
            )
    return hsic1(moments) / (own[0] * own[1]).sqrt()


def hsic1(moments: Moments) -> Tensor:
    """The unbiased estimate of HSIC with linear kernels."""
    m, n = moments, moments.n
    trace = m.xy.square().sum() - m.ab
    k, l_ = m.x @ m.x - m.a, m.y @ m.y - m.b
    kl = m.x @ m.xy @ m.y - m.ay @ m.y - m.bx @ m.x + m.ab
    return (trace + k * l_ / ((n - 1) * (n - 2)) - 2 * kl / (n - 2)) / (n * (n - 3))


def canonical_correlations(moments: Moments, explained: float = 1.0, tolerance: float = 1e-10) -> Tensor:
    """(k,) canonical correlations of X and Y, the largest first (Hotelling, 1936).

    Args:
        explained: share of the variance of each side whose leading principal components are kept first (SVCCA).
        tolerance: components below this share of the largest variance count as none: without it, a side that does not have
            full rank would be divided by rounding errors.

    Raises:
        InterpError: a side does not vary, or has as many dimensions as there are rows: then all correlations are 1.
    """
    xx, yy, xy = moments.covariances()
    _refuse_constant(moments, xx, yy)
    sides = [_whitening(one, explained, tolerance) for one in (xx, yy)]
    if max(side.shape[1] for side in sides) >= float(moments.n) - 1:
        raise InterpError(f"{int(moments.n)} rows are too few for CCA: as many dimensions vary; any pair correlates")
    return torch.linalg.svdvals(sides[0].T @ xy @ sides[1]).clamp(max=1.0)


def cca(moments: Moments) -> Tensor:
    """The mean canonical correlation."""
    return canonical_correlations(moments).mean()


def svcca(moments: Moments, explained: float = 0.99) -> Tensor:
    """The mean canonical correlation of the principal components that explain a share of each side (Raghu et al., 2017)."""
    return canonical_correlations(moments, explained).mean()


def procrustes(moments: Moments, scaled: bool = False) -> Tensor:
    """min over orthogonal R of |X - Y R|^2 = |X|^2 + |Y|^2 - 2 |X'Y|_* (Schoenemann, 1966); zeros fill up a narrower side.

    `scaled`: of sides divided by their norms, from 0 (the same up to rotation and scale) to 2 (Ding et al., 2021).
    """
    xx, yy, xy = moments.covariances()
    nuclear, left, right = torch.linalg.svdvals(xy).sum(), xx.trace(), yy.trace()
    if not scaled:
        return left + right - 2 * nuclear
    _refuse_constant(moments, xx, yy)
    return 2 - 2 * nuclear / (left * right).sqrt()


def rsa(moments: Moments) -> Tensor:
    """Pearson correlation of the squared Euclidean distances of all pairs of rows (Kriegeskorte et al., 2008).

    d_ij = a_i + a_j - 2 x_i x_j is a sum, so the correlation over all n (n - 1) / 2 pairs follows from the moments. Of rows
    without their mean and with length 1 it is that of correlation distances. Rank correlations need every distance, and more
    than one pass.

    Raises:
        InterpError: fewer than 3 rows, or all distances of a side are equal.
    """
    if float(moments.n) < 3:
        raise InterpError(f"RSA needs 3 rows, and there are {int(moments.n)}")
    pairs = moments.n * (moments.n - 1)
    own = [_paired(moments), _paired(moments.swapped())]
    means = [_distances(one) / pairs for one in own]
    variances = [_products(one) / pairs - mean.square() for one, mean in zip(own, means, strict=True)]
    if min(float(one) / max(float(mean.square()), 1e-300) for one, mean in zip(variances, means, strict=True)) <= ROUNDING:
        raise InterpError("all rows of a side have the same distance; their distances do not correlate with anything")
    return (_products(moments) / pairs - means[0] * means[1]) / (variances[0] * variances[1]).sqrt()


MEASURES = {"cka": unbiased_cka, "biased_cka": cka, "cca": cca, "svcca": svcca, "rsa": rsa}
"""What a heat map may show: 1 for the same up to rotation and scale."""


def _paired(m: Moments) -> Moments:
    """Of the pair (X, X)."""
    origins = (m.x_origin, m.x_origin)
    return Moments(*origins, m.n, m.x, m.x, m.xx, m.xx, m.xx, m.a, m.a, m.aa, m.aa, m.aa, m.ax, m.ax, m.ax, m.ax)


def _distances(m: Moments) -> Tensor:
    """Sum over ordered pairs of the squared distances of X."""
    return 2 * m.n * m.a - 2 * (m.x @ m.x)


def _products(m: Moments) -> Tensor:
    """Sum over ordered pairs of the product of squared distances of X and of Y."""
    return 2 * m.n * m.ab + 2 * m.a * m.b - 4 * (m.ay @ m.y) - 4 * (m.bx @ m.x) + 4 * m.xy.square().sum()


def _whitening(covariance: Tensor, explained: float, tolerance: float) -> Tensor:
    values, vectors = torch.linalg.eigh(covariance)
    values, vectors = values.flip(0), vectors.flip(1)
    kept = values > values[0] * tolerance
    if explained < 1:
        shares = values.clamp(min=0).cumsum(0) / values.clamp(min=0).sum()
        kept &= torch.arange(len(values), device=values.device) <= (shares < explained).sum()
    return vectors[:, kept] / values[kept].sqrt()


def _refuse_constant(moments: Moments, xx: Tensor, yy: Tensor) -> None:
    for name, one, origin in (("x", xx, moments.x_origin), ("y", yy, moments.y_origin)):
        if not bool(one.isfinite().all()):
            raise InterpError(f"rows of {name} hold values that are NaN or infinite; leave them out")
        if not float(one.trace()) > 1e-28 * float(moments.n * (origin @ origin)):
            raise InterpError(f"all rows of {name} are equal; nothing can be compared with them")
