"""Frozen matrices in 8 or 4 bits, which are dequantized where a product needs them (QLoRA, Dettmers et al., 2023).

`int8` has one scale per row, the largest absolute value / 127. `nf4` has one scale per block of 64 values of a row, the largest
absolute value, and codes of 4 bits for 16 levels, which are quantiles of a normal distribution; a byte has two codes, the first
one in its high bits. Scales are fp32, and are not quantized a second time: a matrix takes 8 bits per value and 32 per row, or 4.5
bits per value.

Codes have the name of the matrix, and its logical dimensions; the scales of `weight` are `weight_scale`. Rows and blocks of rows
are independent. So strategies split codes and scales as they split the matrix, and a part of a quantized matrix equals the
quantized part. Scales are stored as the bits of fp32 numbers (int32), because strategies cast floating-point parameters to the
compute dtype.

torchao has an NF4 tensor as well. Its subclass of Tensor is split along rows only, holds no stacks of experts, rounds the levels
to four decimals, and is not in the public modules of torchao 0.18. So it is a reference in the tests, and no run needs it.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from forge_core.specs import Dim, Init, TensorSpec
from forge_models.base_format import NF4_BLOCK, Format, rows_refusal
from forge_models.blocks.layers import Linear
from forge_models.blocks.lora import DoRALinear, LoRAExperts, LoRALinear
from forge_models.blocks.moe.experts import Experts

Product = Callable[[Tensor, Tensor], Tensor]

SCALE = "_scale"
"""Suffix of the name of a matrix, which makes the name of its scales."""
LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Values of the codes of `nf4`, in units of the scale."""


def code_shape(shape: Sequence[int], kind: Format) -> tuple[int, ...]:
    """Returns the shape of the codes of a matrix, or a stack of matrices, of `shape` (..., outputs, inputs)."""
    return (*shape[:-1], shape[-1] // 2 if kind == "nf4" else shape[-1])


def scale_shape(shape: Sequence[int], kind: Format) -> tuple[int, ...]:
    """Returns the shape of the scales of a matrix, or a stack of matrices, of `shape` (..., outputs, inputs)."""
    return (*shape[:-1], shape[-1] // NF4_BLOCK if kind == "nf4" else 1)


def quantized(matrix: Tensor, kind: Format) -> tuple[Tensor, Tensor]:
    """Quantizes each row of (..., inputs), in fp32.

    Returns:
        Codes, int8 (..., inputs) or uint8 (..., inputs / 2), and scales, the bits of fp32 numbers as int32 (..., 1) or
        (..., inputs / 64).
    """
    wide = matrix.float()
    if kind == "int8":
        scale = wide.abs().amax(-1, keepdim=True) / 127
        codes = (wide * scale.reciprocal().where(scale > 0, 0.0)).round().clamp(-127, 127).to(torch.int8)
        return codes, scale.view(torch.int32)
    blocks = wide.unflatten(-1, (-1, NF4_BLOCK))
    scale = blocks.abs().amax(-1)
    unit = blocks / scale.where(scale > 0, 1.0).unsqueeze(-1)
    levels = torch.tensor(LEVELS).to(wide.device, non_blocking=True)
    codes = torch.bucketize(unit, (levels[:-1] + levels[1:]) / 2, out_int32=True).to(torch.uint8).flatten(-2)
    return codes[..., ::2] << 4 | codes[..., 1::2], scale.view(torch.int32)


def dequantized(codes: Tensor, scale: Tensor, kind: Format, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns the values of codes (see `quantized`), (..., inputs): products in fp32, rounded once to `dtype`."""
    factor = scale.view(torch.float32)
    if kind == "int8":
        return (codes.float() * factor).to(dtype)
    levels = torch.tensor(LEVELS).to(codes.device, non_blocking=True)
    pairs = torch.stack((levels[(codes >> 4).int()], levels[(codes & 15).int()]), -1)
    return (pairs.flatten(-2).unflatten(-1, (-1, NF4_BLOCK)) * factor.unsqueeze(-1)).flatten(-2).to(dtype)


class FrozenProduct(torch.autograd.Function):
    """Multiplies rows with a quantized matrix. Keeps the codes for the backward, and dequantizes them again there."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None, kind: Format, product: Any) -> Tensor:
        """Rows (..., inputs) and codes of (outputs, inputs) -> (..., outputs); with `product`, codes of a stack."""
        ctx.save_for_backward(codes, scale)
        ctx.kind, ctx.product = kind, product
        matrix = dequantized(codes, scale, kind, rows.dtype)
        return F.linear(rows, matrix, bias) if product is None else product(rows, matrix)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (grad,) = grads
        codes, scale = ctx.saved_tensors
        transposed = dequantized(codes, scale, ctx.kind, grad.dtype).transpose(-2, -1)
        product = F.linear if ctx.product is None else ctx.product
        return product(grad, transposed), None, None, None, None, None


class QuantizedLinear(Linear):
    """A linear layer with a quantized weight. Its bias, if it has one, is not quantized."""

    treats_blocks_alike: ClassVar[bool] = True
    weight_scale: Tensor
    base_format: Format
    dims: tuple[Dim, Dim]

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # the name in torch
        """(..., inputs) -> (..., outputs)."""
        return FrozenProduct.apply(input, self.weight, self.weight_scale, self.bias, self.base_format, None)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs of the codes and the scales, by name relative to this module."""
        return quantized_specs("weight", self.dims, self.base_format)


class QuantizedLoRALinear(LoRALinear, QuantizedLinear):
    """A linear layer with a quantized weight and an adapter."""

    treats_blocks_alike: ClassVar[bool] = True

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs of the codes, the scales and the adapter, by name relative to this module."""
        return LoRALinear.tensor_specs(self) | QuantizedLinear.tensor_specs(self)


class QuantizedDoRALinear(DoRALinear, QuantizedLoRALinear):
    """A linear layer with a quantized weight, an adapter, and a trained length of each row."""

    treats_blocks_alike: ClassVar[bool] = True

    def unbiased(self, rows: Tensor) -> Tensor:
        """See `DoRALinear.unbiased`."""
        return FrozenProduct.apply(rows, self.weight, self.weight_scale, None, self.base_format, None)

    def matrix(self) -> Tensor:
        """Returns the dequantized weight, in the dtype of the adapter."""
        return dequantized(self.weight, self.weight_scale, self.base_format, self.lora_a.dtype)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs of the codes, the scales and the adapter, by name relative to this module."""
        return QuantizedLoRALinear.tensor_specs(self)


class QuantizedExperts(Experts):
    """Stacked experts whose matrices are quantized."""

    treats_blocks_alike: ClassVar[bool] = True
    base_format: Format

    def project(self, product: Product, rows: Tensor, name: str) -> Tensor:
        """See `Experts.project`."""
        return FrozenProduct.apply(rows, getattr(self, name), getattr(self, name + SCALE), None, self.base_format, product)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs of the parameters, by name relative to this module."""
        specs = super().tensor_specs()
        for name, spec in list(specs.items()):
            if hasattr(self, name + SCALE):
                specs |= quantized_specs(name, spec.dims, self.base_format)
        return specs


class QuantizedLoRAExperts(LoRAExperts, QuantizedExperts):
    """Stacked experts whose matrices are quantized; each expert has its own adapter."""

    treats_blocks_alike: ClassVar[bool] = True


def quantized_specs(name: str, dims: Sequence[Dim], kind: Format) -> dict[str, TensorSpec]:
    """Returns the specs of the codes and scales of a matrix, or a stack, with `dims` (..., outputs, inputs). They are zero until
    the base is read."""
    stacked, zeros = len(dims) > 2, Init("zeros")
    whole = tuple(dims) if kind == "nf4" else (*dims[:-1], None)
    return {
        name: TensorSpec(tuple(dims), zeros, "matrix", stacked),
        name + SCALE: TensorSpec(whole, zeros, "matrix", stacked),
    }


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: QuantizedLinear,
    Linear: QuantizedLinear,
    LoRALinear: QuantizedLoRALinear,
    DoRALinear: QuantizedDoRALinear,
    Experts: QuantizedExperts,
    LoRAExperts: QuantizedLoRAExperts,
}


def quantize(model: nn.Module, names: Sequence[str], kind: Format) -> None:
    """Replaces matrices of a frozen base on the meta device by codes and scales; all adapters have been attached.

    Args:
        model: a model with `specs()`; its modules are changed in place.
        names: names of matrices (see `forge_models.blocks.lora.matrices_of`), each once.
        kind: format of the codes.

    Raises:
        ValueError: a row cannot be divided into blocks, or a layer has a forward of its own.
    """
    specs = model.specs().tensors  # type: ignore[operator]
    for name in names:
        path, _, slot = name.rpartition(".")
        owner: Any = model.get_submodule(path)
        stacked = isinstance(owner, Experts)
        if not stacked:
            owner, slot = model.get_submodule(name), "weight"
            owner.dims = specs[f"{name}.weight"].dims
        matrix = getattr(owner, slot)
        if why := rows_refusal(name, matrix.shape[-1], kind):
            raise ValueError(why)
        if type(owner) not in _CLASSES.values():
            if type(owner) not in _CLASSES:
                raise ValueError(f"base_format: {name} is a {type(owner).__name__}, which cannot be quantized; use 'full'")
            owner.__class__ = _CLASSES[type(owner)]
        owner.base_format = kind
        codes = torch.empty(code_shape(matrix.shape, kind), dtype=CODES[kind], device=matrix.device)
        scales = torch.empty(scale_shape(matrix.shape, kind), dtype=torch.int32, device=matrix.device)
        setattr(owner, slot, nn.Parameter(codes, requires_grad=False))
        setattr(owner, slot + SCALE, nn.Parameter(scales, requires_grad=False))


CODES = {"int8": torch.int8, "nf4": torch.uint8}
"""dtype of the codes of each format."""


def quantized_names(model: nn.Module) -> dict[str, Format]:
    """Returns the global names of all quantized matrices of a model, with their formats."""
    found: dict[str, Format] = {}
    for path, module in model.named_modules():
        for slot in dict(module.named_parameters(recurse=False)):
            if slot.endswith(SCALE) and hasattr(module, "base_format"):
                found[f"{path}.{slot.removesuffix(SCALE)}"] = module.base_format  # type: ignore[assignment]
    return found
