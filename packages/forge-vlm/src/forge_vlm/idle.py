"""Modules that a batch has nothing for, such as an encoder where no row has an image: they run on next to nothing.

Ranks that exchange their weights and gradients have to run them alike, whether a rank's rows need them or not.
"""

from typing import Any

import torch
from torch import Tensor

from forge_models.autograd import attach


def with_zero_gradient(x: Tensor, *made: Tensor) -> Tensor:
    """`x` itself; its backward also runs that of `made`, with a gradient of zero: what made them has one, not none."""
    for each in made:
        if each.requires_grad:
            x = attach(x, each.sum(), each.new_zeros(()))
    return x


def no_tokens_of(x: Tensor) -> Tensor:
    """(1, 0, ...) of (B, T, ...). It has a gradient where `x` has one, since experts on other ranks send it back, and that costs
    nothing: a slice of `x` would fill as much as `x` with zeros."""
    return _NoTokens.apply(x)


class _NoTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        del ctx
        return x.new_empty((1, 0, *x.shape[2:]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:  # type: ignore[override]
        del ctx, grads
