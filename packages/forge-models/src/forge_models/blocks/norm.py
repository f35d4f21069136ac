"""Norms over the last dimension."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from forge_core.specs import Init, TensorSpec
from forge_models.blocks.layers import unfilled


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (offset + weight), computed in fp32 and rounded once."""

    def __init__(self, dim: int, eps: float, offset: int = 0) -> None:
        super().__init__()
        self.weight = unfilled(dim)
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim) in the dtype of `x`."""
        # 1 + weight is formed in fp32: in bf16 it would lose most digits of a weight near zero.
        weight = _wide(self.weight) + self.offset if self.offset else self.weight
        if torch.compiler.is_compiling():  # a compiler fuses the plain formula and derives its backward
            wide = _wide(x)
            return (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt() * weight).to(x.dtype)
        return _RMSNorm.apply(x, weight, self.eps)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """The weight starts where offset + weight = 1."""
        return {"weight": TensorSpec((None,), Init("zeros" if self.offset else "ones"), "vector")}


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias, computed in fp32 and rounded once."""

    def __init__(self, dim: int, eps: float, bias: bool = True) -> None:
        super().__init__()
        self.weight = unfilled(dim)
        self.bias = unfilled(dim) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim) in the dtype of `x`."""
        bias = None if self.bias is None else _wide(self.bias)
        return F.layer_norm(_wide(x), self.weight.shape, _wide(self.weight), bias, self.eps).to(x.dtype)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """The weight starts at one, the bias at zero."""
        specs = {"weight": TensorSpec((None,), Init("ones"), "vector")}
        return specs if self.bias is None else specs | {"bias": TensorSpec((None,), Init("zeros"), "vector")}


def _wide(x: Tensor) -> Tensor:
    """At least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _RMSNorm(torch.autograd.Function):
    """Written out because autograd's composition keeps and touches about twice as many (..., dim) tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _wide(x)
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square().div(x.shape[-1]).add(eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        grad = grads[0].to(scale.dtype)
        # y = n w with n = x s: dx = s (g w - n mean(g w n)), dw = sum(g n)
        unit = x * scale
        product = grad * unit
        weight_grad = product.flatten(0, -2).sum(0)
        mean = (product @ weight.to(scale.dtype)).unsqueeze(-1) / x.shape[-1]
        x_grad = (grad * weight).addcmul_(unit, mean, value=-1).mul_(scale)
        return x_grad.to(x.dtype), weight_grad.to(weight.dtype), None
