"""Measures of few rows from their products X X' alone, which are small where rows are wide: for what is kept over a training."""

import torch
from torch import Tensor

from forge_models.interp.similarity.kernel import hsic1


def gram(x: Tensor) -> Tensor:
    """(n, n) fp64 of rows (n, width): X X' of the rows without their mean."""
    rows = x.detach().double()
    rows = rows - rows.mean(0)
    return rows @ rows.T


def gram_cka(left: Tensor, right: Tensor) -> Tensor:
    """Unbiased linear CKA (Nguyen et al., 2021), in fp64, as `linear.unbiased_cka`; NaN where one side does not vary."""
    left, right = left.double(), right.double()
    return hsic1(left, right) / (hsic1(left, left).clamp(min=0) * hsic1(right, right).clamp(min=0)).sqrt()


def gram_rank(products: Tensor) -> Tensor:
    """Effective rank in fp64, as `recipes.geometry.effective_rank` of the rows; NaN where they do not vary."""
    sizes = torch.linalg.eigvalsh(products.double())
    sizes = sizes.where(sizes > sizes[-1] * 1e-14, 0.0).sqrt()  # below is rounding
    shares = sizes / sizes.sum()
    return torch.special.entr(shares).sum().exp()
