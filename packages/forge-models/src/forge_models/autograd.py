"""Gradients that are added to a tensor without changing its value."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def attach(x: Tensor, loss: Tensor, scale: Tensor | None) -> Tensor:
    """Returns `x`; its backward also adds the gradient of scale * loss (scale None = 1) to the inputs of `loss`.

    The gradient of `loss` reaches the parameters although it is not part of the loss that a step minimizes; `x` may have any
    shape.
    """
    return _Attach.apply(x, loss, loss.new_ones(()) if scale is None else scale.to(loss.dtype))


def with_gradient_of(value: Tensor, other: Tensor) -> Tensor:
    """Returns a copy of the scalar `value` whose backward passes its gradient to `value` and to the scalar `other`."""
    return _WithGradientOf.apply(value, other)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Tensor) -> Tensor:  # noqa: ARG004 (its gradient is what counts)
        ctx.save_for_backward(scale)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        return grads[0], ctx.saved_tensors[0], None


class _WithGradientOf(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, value: Tensor, other: Tensor) -> Tensor:  # noqa: ARG004 (only its gradient counts)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(_: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return grads[0], grads[0]
