"""Matrices and tables whose values come from the model's specs, not from their constructors."""

from math import nan

import torch
from torch import nn

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

    def reset_parameters(self) -> None:
        """Leaves NaN; free on the meta device."""
        nn.init.constant_(self.weight, nan)
