"""Modules of one matrix or vector, and what may be wrong with any module."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from forge_core.specs import Init, TensorSpec

VECTOR = TensorSpec((None,), Init("ones"), "vector")
MATRIX = TensorSpec(("embed", "embed"), Init("normal", 0.1), "matrix")


class One(nn.Module):
    """`work(weight, x, *rest)`; `specs` are what it says of its tensors."""

    def __init__(self, work: Callable[..., Tensor], *shape: int, specs: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))
        self.work = work
        self.specs = {"weight": VECTOR if len(shape) == 1 else MATRIX} if specs is None else specs

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return self.work(self.weight, x, *rest)

    def tensor_specs(self) -> Any:
        return self.specs


def noisy(weight: Tensor, x: Tensor, *rest: Any) -> Tensor:
    return nn.functional.dropout(x * weight.sum(), 0.5, training=True)


def unused(weight: Tensor, x: Tensor, *rest: Any) -> Tensor:
    return x.clone().requires_grad_()


def neutral(weight: Tensor, x: Tensor, *rest: Any) -> Tensor:
    return x + 0 * weight.sum()


def infinite(weight: Tensor, x: Tensor, *rest: Any) -> Tensor:
    return x + (weight - weight).sum().sqrt()


def average(weight: Tensor, x: Tensor, *rest: Any) -> Tensor:
    """Of all tokens of the row, later ones too."""
    return (x + x.mean(-2, keepdim=True)) * weight.sum()


def running(weight: Tensor, x: Tensor, *rest: Any) -> Tensor:
    """Of all tokens so far, of other documents too."""
    return x.cumsum(-2) * weight.sum()


def alone(weight: Tensor, x: Tensor, *rest: Any) -> Tensor:
    return x * weight.sum()


def halves(weight: Tensor, x: Tensor, *rest: Any) -> Tensor:
    return x[..., : x.shape[-1] // 2] * weight.sum()
