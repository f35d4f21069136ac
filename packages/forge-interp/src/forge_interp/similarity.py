"""CKA, CCA, SVCCA, Procrustes, and RSA of squared distances, exactly from sums over pairs of activations (`Moments`).

With rows x_i (width p) and y_i (width q) of the same n tokens, a_i = |x_i|^2 and b_i = |y_i|^2, the sums are n, those of x, y,
a, b, a^2, b^2, ab, ax, ay, bx, by, and the products X'X, Y'Y, X'Y; all in fp64. Memory does not grow with the number of tokens.
Sums of batches, ranks and splits can be added; the order changes only the last bits.

Rows are taken relative to an origin near their mean, which does not affect any measure. The residual stream has dimensions whose
mean is a thousand times their standard deviation, so fourth powers without an origin would lose all digits. The sums about
another origin follow from x = x' + d: a = a' + 2 d x' + |d|^2, and likewise for the others.

Similarity with any kernel cannot be computed exactly from sums over one pass. `KernelSums` estimates CKA from minibatches. The
Gram measures for few rows need only the products X X', which are small for wide rows, so that they can be kept over a whole
training run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from forge_interp.tap_names import InterpError


@dataclass(frozen=True)
class Moments:
    """Sums over the rows of a pair (X, Y), relative to an origin. Create it with `of` or `zero`, and add.

    Attributes:
        x_origin: (p,) vector subtracted from every row of X; `y_origin` (q,) of Y.
        n: scalar, number of rows.
        x: (p,) sum of the rows of X, and so on for `y`.
        xx: (p, p) X'X; `yy` (q, q); `xy` (p, q) X'Y.
        a: scalar, sum of a; `b` of b; `aa`, `bb`, `ab` of their products.
        ax: (p,) sum of a x; `bx` (p,), `ay` (q,), `by` (q,).
    """

    x_origin: Tensor
    y_origin: Tensor
    n: Tensor
    x: Tensor
    y: Tensor
    xx: Tensor
    yy: Tensor
    xy: Tensor
    a: Tensor
    b: Tensor
    aa: Tensor
    bb: Tensor
    ab: Tensor
    ax: Tensor
    bx: Tensor
    ay: Tensor
    by: Tensor

    @classmethod
    def zero(cls, x_width: int, y_width: int, device: torch.device | str = "cpu") -> "Moments":
        """Returns the moments of zero rows."""
        return cls.of(*(torch.zeros(0, width, device=device) for width in (x_width, y_width)))

    @classmethod
    def of(cls, x: Tensor, y: Tensor) -> "Moments":
        """Computes the moments of x (..., p) and y (..., q), which have the same tokens and any dtype.

        Raises:
            InterpError: x and y differ in their numbers of tokens, or have values that are not finite.
        """
        if x.shape[:-1] != y.shape[:-1] or x.dim() < 2:
            raise InterpError(f"x {tuple(x.shape)} and y {tuple(y.shape)} are not of the same tokens")
        x, y = (value.detach().reshape(-1, value.shape[-1]).double() for value in (x, y))
        x_mean, y_mean = (one.mean(0) if len(one) else one.new_zeros(one.shape[1]) for one in (x, y))
        x, y = x - x_mean, y - y_mean
        a, b = x.square().sum(1), y.square().sum(1)
        if not bool((a.sum() + b.sum()).isfinite()):
            raise InterpError("activations hold values that are not finite, and so would every similarity")
        return cls(
            x_origin=x_mean,
            y_origin=y_mean,
            n=torch.full((), len(x), dtype=torch.float64, device=x.device),
            x=x.sum(0),
            y=y.sum(0),
            xx=x.T @ x,
            yy=y.T @ y,
            xy=x.T @ y,
            a=a.sum(),
            b=b.sum(),
            aa=a @ a,
            bb=b @ b,
            ab=a @ b,
            ax=a @ x,
            bx=b @ x,
            ay=a @ y,
            by=b @ y,
        )

    def __add__(self, other: "Moments") -> "Moments":
        """Returns the moments of the rows of both."""
        if self.xy.shape != other.xy.shape:
            raise InterpError(f"sums of widths {tuple(self.xy.shape)} and {tuple(other.xy.shape)} cannot be added")
        n = (self.n + other.n).clamp(min=1)
        mean = [getattr(self, one) * (self.n / n) + getattr(other, one) * (other.n / n) for one in _ORIGINS]
        left, right = self.about(*mean), other.about(*mean)
        return replace(left, **{name: getattr(left, name) + getattr(right, name) for name in _SUMS})

    def about(self, x_origin: Tensor, y_origin: Tensor) -> "Moments":
        """Returns the moments of the same rows relative to another origin."""
        m, d, e = self, self.x_origin - x_origin, self.y_origin - y_origin
        dd, ee, dx, ey = d @ d, e @ e, d @ self.x, e @ self.y
        return Moments(
            x_origin=x_origin,
            y_origin=y_origin,
            n=m.n,
            x=m.x + m.n * d,
            y=m.y + m.n * e,
            xx=_moved(m.xx, m.x, m.x, d, d, m.n),
            yy=_moved(m.yy, m.y, m.y, e, e, m.n),
            xy=_moved(m.xy, m.x, m.y, d, e, m.n),
            a=m.a + 2 * dx + m.n * dd,
            b=m.b + 2 * ey + m.n * ee,
            aa=m.aa + 4 * (d @ m.ax) + 2 * dd * m.a + 4 * (d @ m.xx @ d) + 4 * dd * dx + m.n * dd * dd,
            bb=m.bb + 4 * (e @ m.by) + 2 * ee * m.b + 4 * (e @ m.yy @ e) + 4 * ee * ey + m.n * ee * ee,
            ab=m.ab
            + (2 * (e @ m.ay) + ee * m.a + 2 * (d @ m.bx) + dd * m.b)
            + (4 * (d @ m.xy @ e) + 2 * ee * dx + 2 * dd * ey + m.n * dd * ee),
            ax=m.ax + m.a * d + 2 * (m.xx @ d) + 2 * dx * d + dd * m.x + m.n * dd * d,
            bx=m.bx + m.b * d + 2 * (m.xy @ e) + 2 * ey * d + ee * m.x + m.n * ee * d,
            ay=m.ay + m.a * e + 2 * (d @ m.xy) + 2 * dx * e + dd * m.y + m.n * dd * e,
            by=m.by + m.b * e + 2 * (m.yy @ e) + 2 * ey * e + ee * m.y + m.n * ee * e,
        )

    def reduced(self, sum_over_ranks: Callable[[Tensor], Tensor]) -> "Moments":
        """Collective: returns the moments of the rows of all ranks. The ranks agree on an origin and sum one fp64 vector.

        `sum_over_ranks` sums a vector over the ranks, such as `over(group)`.
        """
        origins = [self.n * getattr(self, name) for name in _ORIGINS]
        n, *sums = sum_over_ranks(torch.cat([self.n.reshape(1), *origins])).split([1, *map(len, origins)])
        here = self.about(*(one / n.clamp(min=1) for one in sums))
        parts = [getattr(here, name) for name in _SUMS]
        whole = sum_over_ranks(torch.cat([part.reshape(-1) for part in parts])).split([part.numel() for part in parts])
        return replace(here, **{name: new.view_as(old) for name, new, old in zip(_SUMS, whole, parts, strict=True)})

    def swapped(self) -> "Moments":
        """Returns the moments of the pair (Y, X)."""
        other = {"x": "y", "y": "x", "xx": "yy", "yy": "xx", "a": "b", "b": "a", "aa": "bb", "bb": "aa"}
        other |= {"ax": "by", "by": "ax", "bx": "ay", "ay": "bx", "x_origin": "y_origin", "y_origin": "x_origin"}
        return replace(self, **{name: getattr(self, source) for name, source in other.items()}, xy=self.xy.T)

    def covariances(self) -> tuple[Tensor, Tensor, Tensor]:
        """Returns Xc'Xc, Yc'Yc and Xc'Yc of the centered rows, not divided by n.

        Raises:
            InterpError: there are no rows.
        """
        if not float(self.n):
            raise InterpError("sums of no rows compare nothing")
        outer = ((self.x, self.x), (self.y, self.y), (self.x, self.y))
        sums = (self.xx, self.yy, self.xy)
        xx, yy, xy = (one - torch.outer(u, v) / self.n for one, (u, v) in zip(sums, outer, strict=True))
        return xx, yy, xy


_ORIGINS = ("x_origin", "y_origin")
_SUMS = tuple(field.name for field in fields(Moments) if field.name not in _ORIGINS)


def _moved(uv: Tensor, u: Tensor, v: Tensor, d: Tensor, e: Tensor, n: Tensor) -> Tensor:
    """Returns the sum of (u + d)(v + e)' over n rows, from the sums of uv', u and v."""
    return uv + torch.outer(u, e) + torch.outer(d, v) + n * torch.outer(d, e)


def over(group: object | None = None) -> Callable[[Tensor], Tensor]:
    """Returns a collective function that sums a vector over a process group of torch.distributed; None = all ranks."""

    def add(vector: Tensor) -> Tensor:
        from torch import distributed

        vector = vector.clone()
        distributed.all_reduce(vector, group=group)  # type: ignore[arg-type]
        return vector

    return add


def cka(moments: Moments) -> Tensor:
    """Returns |X'Y|^2 / (|X'X| |Y'Y|) with Frobenius norms (Kornblith et al., 2019). Biased: with few rows it is large for any
    pair.

    Raises:
        InterpError: all rows of one side are equal.
    """
    xx, yy, xy = moments.covariances()
    below = xx.norm() * yy.norm()
    _refuse_constant(moments, xx, yy)
    return xy.square().sum() / below


def unbiased_cka(moments: Moments) -> Tensor:
    """Returns HSIC1(K, L) / sqrt(HSIC1(K, K) HSIC1(L, L)) (Song et al., 2012; Nguyen et al., 2021); about 0 for independent rows.

    HSIC1 = [tr(K~L~) + 1'K~1 1'L~1 / ((n - 1)(n - 2)) - 2 / (n - 2) 1'K~L~1] / (n (n - 3)), where K~ is K without its diagonal.

    Raises:
        InterpError: there are fewer than 4 rows, or the rows of one side are equal or equidistant, so that its HSIC1 is 0.
    """
    if float(moments.n) < 4:
        raise InterpError(f"unbiased CKA needs 4 rows, and there are {int(moments.n)}")
    _refuse_constant(moments, *moments.covariances()[:2])
    left, right = _paired(moments), _paired(moments.swapped())
    own = (moments_hsic1(left), moments_hsic1(right))
    for name, one, found in (("x", left, own[0]), ("y", right, own[1])):
        if not float(found) > ROUNDING * float(one.xx.square().sum() / one.n**2):
            raise InterpError(
                f"unbiased CKA is not defined for {name}: its HSIC with itself is not positive, as for rows that all have "
                "the same distance from each other; take biased_cka, or more rows"
            )
    return moments_hsic1(moments) / (own[0] * own[1]).sqrt()


def moments_hsic1(moments: Moments) -> Tensor:
    """Returns the unbiased estimate of HSIC with linear kernels."""
    m, n = moments, moments.n
    trace = m.xy.square().sum() - m.ab
    k, l_ = m.x @ m.x - m.a, m.y @ m.y - m.b
    kl = m.x @ m.xy @ m.y - m.ay @ m.y - m.bx @ m.x + m.ab
    return (trace + k * l_ / ((n - 1) * (n - 2)) - 2 * kl / (n - 2)) / (n * (n - 3))


def canonical_correlations(moments: Moments, explained: float = 1.0, tolerance: float = 1e-10) -> Tensor:
    """Returns (k,) canonical correlations of X and Y in descending order (Hotelling, 1936).

    Args:
        moments: moments of the pair.
        explained: fraction of the variance of each side that the retained leading principal components explain (SVCCA).
        tolerance: components with a variance below this fraction of the largest are dropped, because a rank-deficient side would
            otherwise be divided by rounding errors.

    Raises:
        InterpError: all rows of a side are equal, or a side has as many dimensions as rows, so that all correlations are 1.
    """
    xx, yy, xy = moments.covariances()
    _refuse_constant(moments, xx, yy)
    sides = [_whitening(one, explained, tolerance) for one in (xx, yy)]
    if max(side.shape[1] for side in sides) >= float(moments.n) - 1:
        raise InterpError(f"{int(moments.n)} rows are too few for CCA: as many dimensions vary; any pair correlates")
    return torch.linalg.svdvals(sides[0].T @ xy @ sides[1]).clamp(max=1.0)


def cca(moments: Moments) -> Tensor:
    """Returns the mean canonical correlation."""
    return canonical_correlations(moments).mean()


def svcca(moments: Moments, explained: float = 0.99) -> Tensor:
    """Returns the mean canonical correlation of the leading principal components of each side (Raghu et al., 2017)."""
    return canonical_correlations(moments, explained).mean()


def procrustes(moments: Moments, scaled: bool = False) -> Tensor:
    """Returns min over orthogonal R of |X - Y R|^2 = |X|^2 + |Y|^2 - 2 |X'Y|_* (Schoenemann, 1966); the narrower side is
    zero-padded.

    `scaled`: whether to divide both sides by their norms; the result is from 0 (equal up to rotation and scale) to 2 (Ding et
    al., 2021).
    """
    xx, yy, xy = moments.covariances()
    nuclear, left, right = torch.linalg.svdvals(xy).sum(), xx.trace(), yy.trace()
    if not scaled:
        return left + right - 2 * nuclear
    _refuse_constant(moments, xx, yy)
    return 2 - 2 * nuclear / (left * right).sqrt()


def rsa(moments: Moments) -> Tensor:
    """Returns the Pearson correlation of the squared Euclidean distances of all pairs of rows (Kriegeskorte et al., 2008).

    d_ij = a_i + a_j - 2 x_i x_j is a sum, so the correlation over all n (n - 1) / 2 pairs follows from the moments. If each row
    is centered and has norm 1, it is the correlation of correlation distances. Rank correlations would need every distance and
    more than one pass.

    Raises:
        InterpError: there are fewer than 3 rows, or all distances of a side are equal.
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
"""Measures for heat maps; each is 1 for sides that are equal up to rotation and scale."""


def _paired(m: Moments) -> Moments:
    """Returns the moments of the pair (X, X)."""
    origins = (m.x_origin, m.x_origin)
    return Moments(*origins, m.n, m.x, m.x, m.xx, m.xx, m.xx, m.a, m.a, m.aa, m.aa, m.aa, m.ax, m.ax, m.ax, m.ax)


def _distances(m: Moments) -> Tensor:
    """Returns the sum over ordered pairs of the squared distances of X."""
    return 2 * m.n * m.a - 2 * (m.x @ m.x)


def _products(m: Moments) -> Tensor:
    """Returns the sum over ordered pairs of the product of squared distances of X and of Y."""
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


ROUNDING = 1e-12
"""Fraction of a kernel's mean square below which its HSIC with itself is a rounding error."""
Kernel = Callable[[Tensor], Tensor]
"""(n, width) -> (n, n)."""


def rbf(bandwidth: float) -> Kernel:
    """Returns the kernel exp(- |x - x'|^2 / (2 bandwidth^2)). The bandwidth is fixed, so all batches have the same kernel."""

    def kernel(x: Tensor) -> Tensor:
        return torch.exp(torch.cdist(x, x).square() / (-2 * bandwidth**2))

    return kernel


@dataclass(frozen=True)
class KernelSums:
    """Sums of HSIC1 over minibatches (Nguyen et al., 2021).

    Each term is an unbiased estimate of HSIC, and so is their mean. CKA is a ratio with a square root of them and is biased: the
    bias falls as 1 / minibatches and does not depend on the minibatch size in expectation. Sums of ranks can be added. The result
    depends on the split into minibatches.
    """

    xy: Tensor
    xx: Tensor
    yy: Tensor
    batches: int

    @classmethod
    def of(cls, x: Tensor, y: Tensor, kernel: Kernel, y_kernel: Kernel | None = None) -> "KernelSums":
        """Computes the sums of one minibatch x (n, p), y (n, q); n is at least 4.

        Raises:
            InterpError: there are fewer than 4 rows, or x and y differ in their number of rows.
        """
        if len(x) != len(y) or len(x) < 4:
            raise InterpError(f"a minibatch needs at least 4 rows, and as many of y as of x, not {len(x)} and {len(y)}")
        k, other = kernel(x.double()), (y_kernel or kernel)(y.double())
        return cls(hsic1(k, other), _spread(k), _spread(other), 1)

    def __add__(self, other: "KernelSums") -> "KernelSums":
        return KernelSums(self.xy + other.xy, self.xx + other.xx, self.yy + other.yy, self.batches + other.batches)

    def cka(self) -> Tensor:
        """Returns mean HSIC1(x, y) / sqrt(mean HSIC1(x, x) mean HSIC1(y, y)).

        Raises:
            InterpError: the rows of one side do not vary.
        """
        if not min(float(self.xx), float(self.yy)) > 0:
            raise InterpError("the rows of one side do not vary under this kernel; take another bandwidth or larger minibatches")
        return self.xy / (self.xx * self.yy).sqrt()


def _spread(k: Tensor) -> Tensor:
    """Returns HSIC1(k, k), or 0 if it is a rounding error."""
    found = hsic1(k, k)
    return found.where(found > ROUNDING * k.square().mean(), 0.0)


def hsic1(k: Tensor, l_: Tensor) -> Tensor:
    """Returns the unbiased estimate of HSIC of two kernel matrices (n, n) of the same rows (Song et al., 2012)."""
    n = len(k)
    k, l_ = (one - torch.diag(one.diagonal()) for one in (k, l_))
    rest = k.sum() * l_.sum() / ((n - 1) * (n - 2)) - 2 * (k.sum(0) @ l_.sum(0)) / (n - 2)
    return ((k * l_).sum() + rest) / (n * (n - 3))


def gram(x: Tensor) -> Tensor:
    """Returns the (n, n) fp64 Gram matrix X X' of the centered rows (n, width)."""
    rows = x.detach().double()
    rows = rows - rows.mean(0)
    return rows @ rows.T


def gram_cka(left: Tensor, right: Tensor) -> Tensor:
    """Returns the unbiased linear CKA (Nguyen et al., 2021) of two Gram matrices in fp64, as `similarity.unbiased_cka`; NaN if
    the rows of one side are equal or equidistant."""
    return gram_cka_pairs([left], [right])[0, 0]


class _Terms(NamedTuple):
    """Terms of HSIC1 (Song et al., 2012) for a kernel matrix (n, n) without its diagonal."""

    flat: Tensor
    diagonal: Tensor
    sums: Tensor

    @classmethod
    def of(cls, k: Tensor) -> "_Terms":
        k = k.double()
        return cls(k.flatten(), k.diagonal(), k.sum(0) - k.diagonal())

    def own(self) -> Tensor:
        """Returns HSIC1 with itself, or NaN if it is not larger than the rounding error."""
        found = self.hsic1(self)
        return found.where(found > ROUNDING * self.flat.square().mean(), float("nan"))

    def hsic1(self, other: "_Terms") -> Tensor:
        n = len(self.diagonal)
        product = self.flat @ other.flat - self.diagonal @ other.diagonal
        rest = self.sums.sum() * other.sums.sum() / ((n - 1) * (n - 2)) - 2 * (self.sums @ other.sums) / (n - 2)
        return (product + rest) / (n * (n - 3))


def gram_cka_pairs(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """Returns (l, r) fp64: `gram_cka` of each of `left` with each of `right`; NaN if it is undefined."""
    first, second = [_Terms.of(one) for one in left], [_Terms.of(one) for one in right]
    mine, others = (torch.stack([one.own() for one in side]) for side in (first, second))
    pairs = torch.stack([torch.stack([one.hsic1(other) for other in second]) for one in first])
    return pairs / torch.outer(mine, others).sqrt()


def gram_rank(products: Tensor) -> Tensor:
    """Returns the effective rank of the rows in fp64 from their Gram matrix, as `methods.probes.effective_rank`; NaN if the rows
    do not vary."""
    sizes = torch.linalg.eigvalsh(products.double())
    sizes = sizes.where(sizes > sizes[-1] * 1e-14, 0.0).sqrt()  # drops rounding errors
    shares = sizes / sizes.sum()
    return torch.special.entr(shares).sum().exp()
