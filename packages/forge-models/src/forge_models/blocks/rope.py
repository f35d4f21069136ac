"""Rotary position embedding (Su et al., 2021), half-split: dimension i turns with dimension i + head_dim / 2."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Rotation(NamedTuple):
    """cos and sin of every angle, fp32, (T, head_dim / 2) or (B, 1, T, head_dim / 2); one per forward for all layers."""

    cos: Tensor
    sin: Tensor


def rotation(positions: Tensor, head_dim: int, theta: float) -> Rotation:
    """Angles position * theta^(-2i / head_dim) for i < head_dim / 2, in fp32.

    Args:
        positions: (T,) or (B, T) integers.
        head_dim: width of one head, even.
        theta: base of the angles.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions.to(torch.float32).unsqueeze(-1) / theta**exponents
    if positions.dim() == 2:
        angles = angles.unsqueeze(1)
    return Rotation(angles.cos(), angles.sin())


def rotate(x: Tensor, turn: Rotation) -> Tensor:
    """`x` (B, heads, T, head_dim) turned by its positions. Computed in fp32, rounded once to the dtype of `x`."""
    if torch.compiler.is_compiling():  # a compiler fuses the plain formula
        first, second = x.chunk(2, dim=-1)
        cos, sin = turn
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return _Rotate.apply(x, *turn)


class _Rotate(torch.autograd.Function):
    """Keeps only the angles and writes each half once: half the time of autograd's composition on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _turned(grads[0], cos, sin, -1), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, direction: int) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    out = torch.empty_like(x, dtype=torch.promote_types(x.dtype, cos.dtype))
    low, high = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=low).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=high).addcmul_(first, sin, value=direction)
    return out.to(x.dtype)
