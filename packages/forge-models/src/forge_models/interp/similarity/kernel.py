"""CKA with any kernel, from minibatches: what no sums of one pass give exactly."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from forge_models.interp.listing import InterpError

ROUNDING = 1e-12
"""Share of a kernel's mean square below which an HSIC of it with itself is rounding."""
Kernel = Callable[[Tensor], Tensor]
"""(n, width) -> (n, n)."""


def rbf(bandwidth: float) -> Kernel:
    """exp(- |x - x'|^2 / (2 bandwidth^2)). The bandwidth is fixed: one that is taken from each batch would be another kernel."""

    def kernel(x: Tensor) -> Tensor:
        return torch.exp(torch.cdist(x, x).square() / (-2 * bandwidth**2))

    return kernel


@dataclass(frozen=True)
class KernelSums:
    """Sums of HSIC1 over minibatches (Nguyen et al., 2021).

    Each term is an unbiased estimate of HSIC, and so is their mean. CKA, a quotient with a root of them, is not: its bias falls
    as 1 / minibatches, and in expectation the size of a minibatch has no part in it. Sums of ranks are added; other
    minibatches give other values.
    """

    xy: Tensor
    xx: Tensor
    yy: Tensor
    batches: int

    @classmethod
    def of(cls, x: Tensor, y: Tensor, kernel: Kernel, y_kernel: Kernel | None = None) -> "KernelSums":
        """Of one minibatch x (n, p), y (n, q); n at least 4.

        Raises:
            InterpError: too few rows, or not of the same tokens.
        """
        if len(x) != len(y) or len(x) < 4:
            raise InterpError(f"a minibatch has 4 rows at least, and as many of y: {len(x)} and {len(y)}")
        k, other = kernel(x.double()), (y_kernel or kernel)(y.double())
        return cls(hsic1(k, other), _spread(k), _spread(other), 1)

    def __add__(self, other: "KernelSums") -> "KernelSums":
        return KernelSums(self.xy + other.xy, self.xx + other.xx, self.yy + other.yy, self.batches + other.batches)

    def cka(self) -> Tensor:
        """Mean HSIC1(x, y) / sqrt(mean HSIC1(x, x) mean HSIC1(y, y)).

        Raises:
            InterpError: one side does not vary.
        """
        if not min(float(self.xx), float(self.yy)) > 0:
            raise InterpError("the rows of one side do not vary under this kernel; take another bandwidth or larger minibatches")
        return self.xy / (self.xx * self.yy).sqrt()


def _spread(k: Tensor) -> Tensor:
    """HSIC1(k, k), and 0 where it is rounding."""
    found = hsic1(k, k)
    return found.where(found > ROUNDING * k.square().mean(), 0.0)


def hsic1(k: Tensor, l_: Tensor) -> Tensor:
    """The unbiased estimate of HSIC of two kernel matrices (n, n) of the same rows (Song et al., 2012)."""
    n = len(k)
    k, l_ = (one - torch.diag(one.diagonal()) for one in (k, l_))
    rest = k.sum() * l_.sum() / ((n - 1) * (n - 2)) - 2 * (k.sum(0) @ l_.sum(0)) / (n - 2)
    return ((k * l_).sum() + rest) / (n * (n - 3))
