"""Check of encoders and adapters with a batch without images."""

import torch
from torch import nn


def idles(module: nn.Module, given: tuple[int, ...], made: tuple[int, ...]) -> None:
    """Asserts that an empty batch (0, *given) returns (0, *made), and that every parameter has a gradient of zero.

    Ranks without images then run the same collectives as other ranks.
    """
    for parameter in module.parameters():
        parameter.requires_grad_()
    found = module(torch.zeros(0, *given, dtype=torch.float64))
    assert tuple(found.shape) == (0, *made), f"an empty batch returns the shape {tuple(found.shape)}, not {(0, *made)}"
    if not any(True for _ in module.parameters()):
        return
    found.sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient for an empty batch; it must be zero"
        assert not bool(parameter.grad.any()), f"{name} has a nonzero gradient for an empty batch"
