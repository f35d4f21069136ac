"""Experts as stacked matrices: one tensor per projection, whose dimension 0 is the expert.

There are two kernels. `grouped` is one kernel for all experts on rows sorted by expert; rows are not padded, so work is
proportional to the number of tokens for any distribution over experts. `loop` runs one expert after the other and supports every
precision and width; it reads the token counts on the host, which synchronizes with the device once per layer.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from forge_core.specs import Dim, Init, TensorSpec
from forge_models import accelerator
from forge_models.blocks.layers import activated, unfilled
from forge_models.shape import Activation, BlockContext, ExpertKernel
from forge_models.torch_private import unsafe_view

ALIGNMENT = 16
"""Alignment in bytes of the rows of both factors of a grouped product."""

GROUPED = (torch.bfloat16, torch.float16, torch.float32)


class Experts(nn.Module):
    """`num_experts` feed-forward layers with hidden width `context.ffn_dim`, for tokens of width `context.dim`, whose logical
    dimension is `width`: None if it is not the residual stream's."""

    treats_blocks_alike: ClassVar[bool] = True

    def __init__(
        self,
        context: BlockContext,
        num_experts: int,
        activation: Activation,
        gated: bool,
        kernel: ExpertKernel = "auto",
        bias: bool = False,
        width: Dim = "embed",
    ) -> None:
        super().__init__()
        self.context, self.activation = context, activation
        self.width: Dim = width
        self.kernel: ExpertKernel = kernel
        self.gate_proj = unfilled(num_experts, context.ffn_dim, context.dim) if gated else None
        self.up_proj = unfilled(num_experts, context.ffn_dim, context.dim)
        self.down_proj = unfilled(num_experts, context.dim, context.ffn_dim)
        self.gate_bias = unfilled(num_experts, context.ffn_dim) if gated and bias else None
        self.up_bias = unfilled(num_experts, context.ffn_dim) if bias else None
        self.down_bias = unfilled(num_experts, context.dim) if bias else None

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Tokens (n, dim) sorted by expert, counts[e] of them for expert e -> outputs (n, dim). Rows after the sum of all counts
        belong to no expert; their outputs are undefined.

        Raises:
            ValueError: the kernel is `grouped`, which does not support this precision or width.
        """
        product = self.products(tokens, counts)
        gate = None
        if self.gate_proj is not None:
            gate = biased(self.project(product, tokens, "gate_proj"), self.gate_bias, counts)
        up = biased(self.project(product, tokens, "up_proj"), self.up_bias, counts)
        hidden = activated(self.activation, up) if gate is None else activated(self.activation, gate, up)
        return biased(ContiguousGradient.apply(self.project(product, hidden, "down_proj")), self.down_bias, counts)

    def project(self, product: Callable[[Tensor, Tensor], Tensor], rows: Tensor, name: str) -> Tensor:
        """Multiplies `rows` (n, inputs) with the stacked matrices `name`; subclasses may add to the result (n, outputs)."""
        return product(rows, getattr(self, name))

    def products(self, tokens: Tensor, counts: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """Returns the product function for the rows of this call; subclasses may override it. See
        `forge_core.protocols.model.ExpertStack`."""
        return grouped_products(tokens, counts, len(self.up_proj), self.widths(), self.kernel)

    def widths(self) -> tuple[int, ...]:
        """Returns the lengths of the rows of all products."""
        return self.context.dim, self.up_proj.shape[1]

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs of the parameters, by name relative to this module; each expert is initialized under its own name."""
        enter = TensorSpec(("expert", "ffn", self.width), Init("normal", self.context.init_std), "matrix", stacked=True)
        leave = TensorSpec(("expert", self.width, "ffn"), Init("normal", self.context.output_std), "matrix", stacked=True)
        gate = {} if self.gate_proj is None else {"gate_proj": enter}
        features = TensorSpec(("expert", "ffn"), Init("zeros"), "vector", stacked=True)
        stream = TensorSpec(("expert", self.width), Init("zeros"), "vector", stacked=True)
        biases = {"gate_bias": features, "up_bias": features, "down_bias": stream}
        used = {name: spec for name, spec in biases.items() if getattr(self, name) is not None}
        return gate | {"up_proj": enter, "down_proj": leave} | used


def grouped_products(
    tokens: Tensor, counts: Tensor, num_experts: int, widths: Sequence[int], kernel: ExpertKernel = "auto"
) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns the function that multiplies rows (n, inputs), sorted by expert, with stacked matrices (expert, outputs, inputs).

    Args:
        tokens: (n, dim), whose dtype and device the products have.
        counts: (num_experts,) rows of each expert.
        num_experts: number of experts.
        widths: lengths of the rows of all products.
        kernel: `grouped`, `loop`, or `auto`, which is `grouped` where it can be used.

    Raises:
        ValueError: the kernel is `grouped`, which does not support this precision or width.
    """
    fault = unfit(tokens.dtype, *widths)
    if kernel == "grouped" and fault:
        raise ValueError(f"model.moe.kernel 'grouped': {fault}; use 'auto' or 'loop'")
    if kernel == "auto":
        if not fault and not torch.compiler.is_compiling():  # the compiler may supply its own kernel
            fault = accelerator.groups_fault(tokens.device, tokens.dtype, num_experts)
        if fault:
            accelerator.warn_of_loop(tokens.device, fault)
        kernel = "loop" if fault else "grouped"
    return _products(counts, len(tokens)) if kernel == "loop" else _grouped(counts)


def unfit(dtype: torch.dtype, *widths: int) -> str:
    """Returns why a grouped product cannot be used; empty if it can."""
    if not hasattr(F, "grouped_mm"):
        return "this version of torch has no grouped_mm"
    if dtype not in GROUPED:
        return f"grouped_mm takes bf16, fp16 and fp32, not {dtype}"
    wrong = [width for width in widths if width * dtype.itemsize % ALIGNMENT]
    return f"rows of {wrong[0]} values are not a multiple of {ALIGNMENT} bytes" if wrong else ""


def _grouped(counts: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    busy = _few_busy(counts)
    ends = (counts if busy is None else counts[busy]).cumsum(0, dtype=torch.int32)

    def product(rows: Tensor, weight: Tensor) -> Tensor:
        chosen = weight if busy is None else weight.index_select(0, busy)
        return F.grouped_mm(rows.contiguous(), chosen.transpose(-2, -1), offs=ends)

    return product


def _few_busy(counts: Tensor) -> Tensor | None:
    """Returns the indices of the experts that have tokens, if these are few and on a CPU; else None.

    The CPU kernel spends microseconds on every empty group, which is more than copying a few matrices costs.
    """
    if counts.device.type != "cpu" or type(counts) is not Tensor or torch.compiler.is_compiling():
        return None
    busy = counts.nonzero().squeeze(1)
    return busy if 0 < len(busy) <= len(counts) // 4 else None


def _products(counts: Tensor, rows: int) -> Callable[[Tensor, Tensor], Tensor]:
    sizes = counts.tolist()
    unassigned = rows - sum(sizes)

    def product(rows: Tensor, weight: Tensor) -> Tensor:
        *groups, rest = rows.split([*sizes, unassigned])
        # An expert without tokens still has a product, of no rows, so that its gradient is zero instead of None.
        made = [F.linear(group, matrix) for group, matrix in zip(groups, weight.unbind(), strict=True)]
        return torch.cat([*made, rest.new_zeros(unassigned, weight.shape[1])])

    return product


def biased(rows: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
    """Adds the bias (experts, width) of each row's expert, if there is one, to rows (n, width) sorted by expert. Rows after
    those of all experts get any bias."""
    return rows if bias is None else _Biased.apply(rows, bias, counts)


class _Biased(torch.autograd.Function):
    """The backward sums the rows of an expert in order, which the gradient of an index does not on a GPU."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(counts)
        ctx.dtype = bias.dtype
        places = torch.arange(len(rows), device=rows.device)
        experts = torch.searchsorted(counts.cumsum(0), places, right=True).clamp_(max=len(bias) - 1)
        return rows + bias.index_select(0, experts).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        (grad,), (counts,) = grads, ctx.saved_tensors
        if not len(grad):
            return grad, grad.new_zeros(len(counts), grad.shape[1], dtype=ctx.dtype), None
        lengths = torch.cat((counts, (len(grad) - counts.sum()).view(1)))
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32)).contiguous()
        sums = torch.segment_reduce(wide, "sum", lengths=lengths, axis=0, unsafe=True, initial=0)
        return grad, sums[:-1].to(ctx.dtype), None


class ContiguousGradient(torch.autograd.Function):
    """Identity with a contiguous gradient. The backward of grouped_mm crashes if the gradient is an expanded scalar, as that of a
    sum is; only the last product can receive such a gradient."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return unsafe_view(x, x.shape)  # FSDP warns about modules that return views

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> Tensor:  # type: ignore[override]
        (grad,) = grads
        # An expanded scalar without elements counts as contiguous, but still has strides of 0.
        return grad.contiguous() if grad.numel() else grad.new_zeros(grad.shape)
