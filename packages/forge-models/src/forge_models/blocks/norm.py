"""Root-mean-square norm."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from forge_core.specs import Init, TensorSpec
from forge_models.blocks.layers import unfilled


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in fp32 and rounded once."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = unfilled(dim)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim) in the dtype of `x`."""
        if torch.compiler.is_compiling():  # a compiler fuses the plain formula and derives its backward
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            return (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight).to(x.dtype)
        return _RMSNorm.apply(x, self.weight, self.eps)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """The weight starts at one."""
        return {"weight": TensorSpec((None,), Init("ones"), "vector")}


class _RMSNorm(torch.autograd.Function):
    """Written out because autograd's composition keeps and touches about twice as many (..., dim) tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
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
