"""The short causal convolution of recurrent layers, per channel, with SiLU behind it. It sees zeros before each document."""

from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from forge_core.specs import Dim, Init, ModuleSpec, TensorSpec
from forge_models.blocks.layers import unfilled

HEADS: tuple[Dim, ...] = ("batch", "sequence", "state_heads")


def widened(x: Tensor) -> Tensor:
    """Converts to fp32, or keeps a wider dtype."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def causal_filter(x: Tensor, filters: Tensor, runs: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Returns SiLU of bias + sum over s of filters[:, -1 - s] * x[:, t - s], (B, T, channels), in fp32 or wider, rounded once.

    Args:
        x: (B, T, channels).
        filters: (channels, width).
        runs: (B, T) number of the document of each position (`document_runs`); positions of other documents count as zeros, as do
            those before the row. None: each row is one document.
        bias: (channels,).
    """
    if torch.compiler.is_compiling():  # a compiler fuses the plain formula and derives its backward
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        total = wide * filters[:, -1]
        for s in range(1, min(filters.shape[1], x.shape[1])):
            earlier = wide[:, :-s] * filters[:, -1 - s]
            total = total + F.pad(earlier if runs is None else earlier * _same(runs, s), (0, 0, s, 0))
        return F.silu(total if bias is None else total + bias).to(x.dtype)
    return _Filter.apply(x, filters, runs, bias)


def _same(runs: Tensor, s: int) -> Tensor:
    """(B, T - s, 1): whether positions t and t - s have the same document."""
    return (runs[:, s:] == runs[:, :-s]).unsqueeze(-1)


class _Filter(torch.autograd.Function):
    """The convolution without the tensors that autograd would keep for each of its terms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, filters: Tensor, runs: Tensor | None, bias: Tensor | None) -> Tensor:
        wide, taps = widened(x), widened(filters)
        total = wide * taps[:, -1]
        for s in range(1, min(taps.shape[1], x.shape[1])):
            earlier = wide[:, :-s] if runs is None else wide[:, :-s] * _same(runs, s)
            total[:, s:].addcmul_(earlier, taps[:, -1 - s])
        if bias is not None:
            total += bias
        ctx.save_for_backward(x, filters, runs, total)
        ctx.bias = None if bias is None else bias.dtype
        return F.silu(total).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, Tensor | None]:  # type: ignore[override]
        x, filters, runs, total = ctx.saved_tensors
        wide, taps = widened(x), widened(filters)
        gate = total.sigmoid()
        grad = gate.addcmul(total * gate, 1 - gate).mul_(grads[0])  # SiLU' = s + x s (1 - s)
        x_grad, filters_grad = grad * taps[:, -1], torch.zeros_like(taps)
        filters_grad[:, -1] = torch.einsum("btc,btc->c", grad, wide)
        for s in range(1, min(taps.shape[1], x.shape[1])):
            later = grad[:, s:] if runs is None else grad[:, s:] * _same(runs, s)
            x_grad[:, :-s].addcmul_(later, taps[:, -1 - s])
            filters_grad[:, -1 - s] = torch.einsum("btc,btc->c", later, wide[:, :-s])
        bias_grad = None if ctx.bias is None else grad.sum((0, 1)).to(ctx.bias)
        return x_grad.to(x.dtype), filters_grad.to(filters.dtype), None, bias_grad


class HeadFilter(nn.Module):
    """Filters (channels, width) of the convolution of one stream, such as the queries. The core, which has whole rows, applies
    them."""

    def __init__(self, channels: int, width: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = unfilled(channels, width)
        self.bias = unfilled(channels) if bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """(B, T, channels) -> the same, its filters (channels, width), and their bias (channels,)."""
        return x, self.weight, self.bias

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs: uniform with a bound of 1 / sqrt(width), as torch initializes convolutions."""
        init = Init("uniform", 1 / sqrt(3 * self.weight.shape[1]))
        specs = {"weight": TensorSpec(("state_heads", None), init, "vector")}
        return specs if self.bias is None else specs | {"bias": TensorSpec(("state_heads",), init, "vector")}

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the layout: each head by itself."""
        return {"": ModuleSpec((HEADS,), (HEADS,))}
