"""Matrices and tables whose values come from the model's specs, not from their constructors."""

from math import nan
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from forge_core.specs import Dim, Init, TensorSpec


def unfilled(*shape: int) -> nn.Parameter:
    """A parameter that holds NaN until it is drawn from its spec: one that was forgotten cannot pass for trained."""
    return nn.Parameter(torch.full(shape, nan))


class Linear(nn.Linear):
    """x @ weight.T (+ bias); strategies find it as a `torch.nn.Linear`."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        """Leaves NaN; free on the meta device."""
        for parameter in self.parameters():
            nn.init.constant_(parameter, nan)


def linear_specs(name: str, layer: nn.Linear, dims: tuple[Dim, Dim], std: float) -> dict[str, TensorSpec]:
    """Specs of the layer called `name`: weight of `dims` (outputs, inputs) drawn with `std`, bias, if any, zero."""
    specs = {f"{name}.weight": TensorSpec(dims, Init("normal", std), "matrix")}
    if layer.bias is not None:
        specs[f"{name}.bias"] = TensorSpec(dims[:1], Init("zeros"), "vector")
    return specs


class Embedding(nn.Embedding):
    """Lookup table of token vectors."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # torch's name of it
        """(...) int64 -> (..., embed)."""
        table = self.weight
        return _Rows.apply(table, input) if table.device.type == "cpu" and table.itemsize < 4 else F.embedding(input, table)

    def reset_parameters(self) -> None:
        """Leaves NaN; free on the meta device."""
        nn.init.constant_(self.weight, nan)


class _Rows(torch.autograd.Function):
    """Rows of a table in bf16. Gradients of a token that comes again are summed in fp32, as torch does on an accelerator.

    On a CPU it sums them in the dtype of the table, and a sum in bf16 stops growing: of 4,096 ones it is 256.
    """

    @staticmethod
    def forward(ctx: Any, table: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows = len(table)
        return F.embedding(tokens, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        tokens = ctx.saved_tensors[0].flatten()
        grad = grad.reshape(len(tokens), grad.shape[-1])
        # Where a token comes again, its gradients meet in the place of one of them.
        place = tokens.new_empty(ctx.rows).index_copy_(0, tokens, torch.arange(len(tokens)))[tokens]
        sums = torch.zeros_like(grad, dtype=torch.float32).index_add_(0, place, grad.float()).to(grad.dtype)
        return grad.new_zeros(ctx.rows, grad.shape[1]).index_copy_(0, tokens, sums[place]), None
