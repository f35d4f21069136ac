"""Measures of few rows from their products X X' alone, which are small where rows are wide: for what is kept over a training."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from forge_models.interp.similarity.kernel import ROUNDING


def gram(x: Tensor) -> Tensor:
    """(n, n) fp64 of rows (n, width): X X' of the rows without their mean."""
    rows = x.detach().double()
    rows = rows - rows.mean(0)
    return rows @ rows.T


def gram_cka(left: Tensor, right: Tensor) -> Tensor:
    """Unbiased linear CKA (Nguyen et al., 2021), in fp64, as `linear.unbiased_cka`; NaN where it is not defined: one side does
    not vary, or its rows all have the same distance from each other."""
    return gram_cka_pairs([left], [right])[0, 0]


class _Terms(NamedTuple):
    """Of a kernel matrix (n, n), what HSIC1 (Song et al., 2012) takes of it without its diagonal."""

    flat: Tensor
    diagonal: Tensor
    sums: Tensor

    @classmethod
    def of(cls, k: Tensor) -> "_Terms":
        k = k.double()
        return cls(k.flatten(), k.diagonal(), k.sum(0) - k.diagonal())

    def own(self) -> Tensor:
        """HSIC1 with itself; NaN where it is not positive, but for rounding."""
        found = self.hsic1(self)
        return found.where(found > ROUNDING * self.flat.square().mean(), float("nan"))

    def hsic1(self, other: "_Terms") -> Tensor:
        n = len(self.diagonal)
        product = self.flat @ other.flat - self.diagonal @ other.diagonal
        rest = self.sums.sum() * other.sums.sum() / ((n - 1) * (n - 2)) - 2 * (self.sums @ other.sums) / (n - 2)
        return (product + rest) / (n * (n - 3))


def gram_cka_pairs(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """(l, r) fp64: `gram_cka` of each of `left` with each of `right`; NaN where it is not defined."""
    first, second = [_Terms.of(one) for one in left], [_Terms.of(one) for one in right]
    mine, others = (torch.stack([one.own() for one in side]) for side in (first, second))
    pairs = torch.stack([torch.stack([one.hsic1(other) for other in second]) for one in first])
    return pairs / torch.outer(mine, others).sqrt()


def gram_rank(products: Tensor) -> Tensor:
    """Effective rank in fp64, as `recipes.geometry.effective_rank` of the rows; NaN where they do not vary."""
    sizes = torch.linalg.eigvalsh(products.double())
    sizes = sizes.where(sizes > sizes[-1] * 1e-14, 0.0).sqrt()  # below is rounding
    shares = sizes / sizes.sum()
    return torch.special.entr(shares).sum().exp()
