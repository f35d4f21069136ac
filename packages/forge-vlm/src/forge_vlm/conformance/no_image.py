"""A batch without an image: what encoders and adapters make of it."""

import torch
from torch import nn


def idles(module: nn.Module, given: tuple[int, ...], made: tuple[int, ...]) -> None:
    """Of (0, *given) it makes (0, *made), and every parameter has a gradient of zero, so that ranks exchange the same."""
    for parameter in module.parameters():
        parameter.requires_grad_()
    found = module(torch.zeros(0, *given, dtype=torch.float64))
    assert tuple(found.shape) == (0, *made), f"of an empty batch it makes the shape {tuple(found.shape)}, not {(0, *made)}"
    if not any(True for _ in module.parameters()):
        return
    found.sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient in an empty batch; it has to be zero"
        assert not bool(parameter.grad.any()), f"{name} has a gradient that is not zero in an empty batch"
