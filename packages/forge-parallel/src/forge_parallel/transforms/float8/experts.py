"""Float8 experts: a subclass of the class of stacked experts, with rowwise float8 matrix products.

With rows x sorted by expert, the matrix w of each expert, and the gradient d of the output, all in E4M3:

    out = x w^T    a scale for each row of x, and for each output of each expert
    dx  = d w      a scale for each row of d, and for each input of each expert
    dw  = d^T x    a scale for each column of an expert's rows of d, and of x

Scales are powers of two. So a token's result and its gradient depend only on the token and its experts, however tokens are spread
over ranks and micro-batches; the rounding of a matrix's gradient depends on the tokens that are summed together. Kernels need a
multiple of 16 rows for each expert, and not 0: rows of zeros, which change no sum, are added.
Imports torchao, which `conversion.require_torchao` must check first.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated

from forge_parallel.placement.shares import FLOAT8_MULTIPLE as MULTIPLE
from forge_parallel.torch_private import scaled_grouped_mm

E4M3 = torch.float8_e4m3fn

Multiply = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, torch.dtype], Tensor]
"""(a, b, scale of a, scale of b, ends, dtype) -> product, in groups of which group e ends before ends[e]. If rows are grouped:
a (n, k) and b (count, k, m), scales (n,) and (count, m) -> (n, m). If the contracted dimension is grouped: a (m, n) and b (n, k),
scales (count, m) and (count, k) -> (count, m, k)."""


class Float8Experts(nn.Module):
    """Mixed into the class of stacked experts (`ExpertStack`); parameters, hooks and all other methods stay."""

    multiply: Multiply

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Runs the original forward on rows padded to multiples of 16."""
        places, filled, rows = padding(counts, len(tokens))
        return _Back.apply(super().forward(_Apart.apply(tokens, places, rows), filled), places)

    def products(self, tokens: Tensor, counts: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """Returns the product for rows of which every expert has a positive multiple of 16."""
        multiply = self.multiply

        def product(rows: Tensor, weight: Tensor) -> Tensor:
            return _Product.apply(rows, weight, counts, multiply)

        return product


@cache
def float8_experts_class(original: type[nn.Module]) -> type[nn.Module]:
    """Returns the converted class of stacked experts, one per original class, so that compiled blocks share a graph."""
    return type(f"{original.__name__}Float8", (Float8Experts, original), {})


def padding(counts: Tensor, rows: int) -> tuple[Tensor, Tensor, int]:
    """Returns the new index of each of `rows` rows, (rows,), the padded number of rows of each expert, (count,), and their total.

    The total is known on the host: it suffices for any counts. Rows without an expert come after those of all experts.
    """
    filled = (counts + MULTIPLE - 1).div(MULTIPLE, rounding_mode="floor").clamp(min=1) * MULTIPLE
    experts = torch.searchsorted(counts.cumsum(0), torch.arange(rows, device=counts.device), right=True)
    moved = F.pad((filled - counts).cumsum(0), (1, 0))
    size = -(-(rows + MULTIPLE * len(counts)) // MULTIPLE) * MULTIPLE
    return torch.arange(rows, device=counts.device) + moved[experts], filled, size


def native(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiplies with the device's kernel, whose results are bf16. `a` is row-major, `b` column-major."""
    a_scale, b_scale = (scale.reciprocal() if b.ndim == 3 else scale.reciprocal().flatten() for scale in (a_scale, b_scale))
    return scaled_grouped_mm(a, b, a_scale, b_scale, ends, out_dtype=dtype, use_fast_accum=True)


@torch.library.custom_op("forge_float8::grouped_mm", mutates_args=())
def emulated(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiplies in fp32. A custom operator, because torch's fp32 operator can be neither compiled nor estimated."""
    left, right = a.float(), b.float()
    if b.ndim == 3:
        return F.grouped_mm(left / a_scale.unsqueeze(1), right / b_scale.unsqueeze(1), offs=ends).to(dtype)
    return (F.grouped_mm(left, right, offs=ends) / a_scale.unsqueeze(2) / b_scale.unsqueeze(1)).to(dtype)


@emulated.register_fake
def _(a: Tensor, b: Tensor, _a_scale: Tensor, _b_scale: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    groups = () if b.ndim == 3 else (len(ends),)
    return a.new_empty(*groups, a.shape[0], b.shape[-1], dtype=dtype)


class _Product(torch.autograd.Function):
    """(rows (n, inputs), weight (count, outputs, inputs), counts, multiply) -> (n, outputs). Saves both operands uncast, because
    the backward casts each along its other dimension."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: Tensor, multiply: Multiply) -> Tensor:
        ctx.save_for_backward(rows, weight, counts)
        ctx.multiply = multiply
        (x, x_scale), (w, w_scale) = _cast(rows, 1), _cast(weight, 2)
        return multiply(x, w.mT, x_scale, w_scale, _ends(counts), rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:  # type: ignore[override]
        (grad,), (rows, weight, counts), by_rows, by_weight = grads, ctx.saved_tensors, None, None
        ends = _ends(counts)
        if ctx.needs_input_grad[0]:
            (d, d_scale), (w, w_scale) = _cast(grad.contiguous(), 1), _cast(weight, 1)
            by_rows = ctx.multiply(d, _column_major(w), d_scale, w_scale, ends, rows.dtype)
        if ctx.needs_input_grad[1]:
            (d, d_scale), (x, x_scale) = _cast_columns(grad, counts), _cast_columns(rows, counts)
            by_weight = ctx.multiply(d.mT.contiguous(), _column_major(x), d_scale, x_scale, ends, weight.dtype)
        return by_rows, by_weight, None, None


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0, dtype=torch.int32)


def _column_major(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def _scale(largest: Tensor) -> Tensor:
    return amax_to_scale(largest, E4M3, round_scales_to_power_of_2=True)


def _cast(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Returns `x` in float8 and its scales, one for all elements along `dim`."""
    scale = _scale(x.abs().amax(dim, keepdim=True))
    return to_fp8_saturated(x.float() * scale, E4M3), scale.squeeze(dim)


def _cast_columns(x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `x` (n, width) in float8 and scales (count, width), one for each column of each expert's rows."""
    tiles = x.abs().unflatten(0, (-1, MULTIPLE)).amax(1)  # all rows of a tile belong to one expert
    per_expert = counts.div(MULTIPLE, rounding_mode="floor")
    scale = _scale(torch.segment_reduce(tiles, "max", lengths=per_expert, axis=0, unsafe=True))
    owners = torch.searchsorted(per_expert.cumsum(0), torch.arange(len(tiles), device=x.device), right=True)
    by_tile = scale[owners.clamp(max=len(counts) - 1)]  # rows without an expert are never read
    return to_fp8_saturated(x.float().unflatten(0, (-1, MULTIPLE)) * by_tile.unsqueeze(1), E4M3).flatten(0, 1), scale


class _Apart(torch.autograd.Function):
    """(n, width) -> (rows, width) with row i at places[i]; all other rows are zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, rows: int) -> Tensor:
        ctx.save_for_backward(places)
        return x.new_zeros(rows, x.shape[1]).index_copy_(0, places, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grads[0][ctx.saved_tensors[0]], None, None


class _Back(torch.autograd.Function):
    """The transpose of `_Apart`: (rows, width) -> (n, width)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.rows = len(x)
        return x[places]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grads[0].new_zeros(ctx.rows, grads[0].shape[1]).index_copy_(0, ctx.saved_tensors[0], grads[0]), None
