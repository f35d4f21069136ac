"""Similarity with any kernel, which cannot be computed exactly from sums over one pass.

`KernelSums` estimates CKA from minibatches. The Gram measures for few rows need only the products X X', which are small for wide
rows, so that they can be kept over a whole training run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from forge_interp.tap_names import InterpError

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
