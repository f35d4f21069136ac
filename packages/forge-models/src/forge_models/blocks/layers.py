"""Matrices and tables whose values come from the model's specs, not from their constructors."""

from math import nan

import torch
from torch import nn


def unfilled(*shape: int) -> nn.Parameter:
    """A parameter that holds NaN until it is drawn from its spec: one that was forgotten cannot pass for trained."""
    return nn.Parameter(torch.full(shape, nan))


class Linear(nn.Linear):
    """x @ weight.T without bias; strategies find it as a `torch.nn.Linear`."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Leaves NaN; free on the meta device."""
        nn.init.constant_(self.weight, nan)


class Embedding(nn.Embedding):
    """Lookup table of token vectors."""

    def reset_parameters(self) -> None:
        """Leaves NaN; free on the meta device."""
        nn.init.constant_(self.weight, nan)
