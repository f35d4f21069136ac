"""Layers of a block: linear layers, embedding, norms over the last dimension, feed-forward layers."""

from collections.abc import Callable, Mapping
from math import nan
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from forge_core.specs import Dim, Init, ModuleSpec, TensorSpec
from forge_models.inner_values import tap
from forge_models.shape import Activation, BlockContext, ClampedGate


def unfilled(*shape: int) -> nn.Parameter:
    """Returns a parameter filled with NaN, so that a parameter that is not initialized from its spec is noticed."""
    return nn.Parameter(torch.full(shape, nan))


class Linear(nn.Linear):
    """x @ weight.T (+ bias), as a `torch.nn.Linear` so that parallel strategies recognize it."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        """Fills with NaN; costs nothing on the meta device."""
        for parameter in self.parameters():
            nn.init.constant_(parameter, nan)


def linear_specs(name: str, layer: nn.Linear | None, dims: tuple[Dim, Dim], std: float) -> dict[str, TensorSpec]:
    """Returns the specs of layer `name`: a weight with `dims` (outputs, inputs), normal with `std`; the bias, if any, is zero. A
    layer that is None has none."""
    if layer is None:
        return {}
    specs = {f"{name}.weight": TensorSpec(dims, Init("normal", std), "matrix")}
    if layer.bias is not None:
        specs[f"{name}.bias"] = TensorSpec(dims[:1], Init("zeros"), "vector")
    return specs


class Embedding(nn.Embedding):
    """Lookup table of token vectors."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # the name in torch
        """(...) int64 -> (..., embed)."""
        return look_up(self.weight, input)

    def reset_parameters(self) -> None:
        """Fills with NaN; costs nothing on the meta device."""
        nn.init.constant_(self.weight, nan)


def look_up(table: Tensor, index: Tensor) -> Tensor:
    """Returns the rows of `table` (n, embed) at `index` (...) int64, (..., embed)."""
    return _Rows.apply(table, index) if table.device.type == "cpu" and table.itemsize < 4 else F.embedding(index, table)


class _Rows(torch.autograd.Function):
    """Looks up rows of a 16-bit table on a CPU; gradients of repeated tokens are summed in fp32, as torch does on an accelerator.

    On a CPU torch sums them in the dtype of the table, and a sum in bf16 stops growing: 4,096 ones add up to 256.
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
        # The gradients of a repeated token are summed at the position of one of its occurrences.
        place = tokens.new_empty(ctx.rows).index_copy_(0, tokens, torch.arange(len(tokens)))[tokens]
        sums = torch.zeros_like(grad, dtype=torch.float32).index_add_(0, place, grad.float()).to(grad.dtype)
        return grad.new_zeros(ctx.rows, grad.shape[1]).index_copy_(0, tokens, sums[place]), None


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (offset + weight), computed in fp32 and rounded once."""

    def __init__(self, dim: int, eps: float, offset: int = 0) -> None:
        super().__init__()
        self.weight = unfilled(dim)
        self.eps = eps
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim) in the dtype of `x`."""
        # 1 + weight is computed in fp32, because bf16 would lose most digits of a weight near zero.
        weight = _wide(self.weight) + self.offset if self.offset else self.weight
        if torch.compiler.is_compiling():  # a compiler fuses the plain formula and derives its backward
            wide = _wide(x)
            return (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt() * weight).to(x.dtype)
        return _RMSNorm.apply(x, weight, self.eps)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the spec of the weight, which starts at 1 - offset."""
        return {"weight": TensorSpec((None,), Init("zeros" if self.offset else "ones"), "vector")}


def unit_rms(x: Tensor, eps: float) -> Tensor:
    """Computes x / sqrt(mean(x^2) + eps) over the last dimension, in fp32 and rounded once: `RMSNorm` without a weight."""
    wide = _wide(x)
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias, computed in fp32 and rounded once; without weight it is 1."""

    def __init__(self, dim: int, eps: float, bias: bool = True, weight: bool = True) -> None:
        super().__init__()
        self.weight = unfilled(dim) if weight else None
        self.bias = unfilled(dim) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim) in the dtype of `x`."""
        bias = None if self.bias is None else _wide(self.bias)
        weight = None if self.weight is None else _wide(self.weight)
        return F.layer_norm(_wide(x), x.shape[-1:], weight, bias, self.eps).to(x.dtype)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs: the weight starts at one, the bias at zero."""
        specs = {"weight": TensorSpec((None,), Init("ones"), "vector"), "bias": TensorSpec((None,), Init("zeros"), "vector")}
        return {name: spec for name, spec in specs.items() if getattr(self, name) is not None}


def _wide(x: Tensor) -> Tensor:
    """Converts to fp32, or keeps a wider dtype."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _RMSNorm(torch.autograd.Function):
    """RMSNorm with an explicit backward: autograd's composition keeps and touches about twice as many (..., dim) tensors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _wide(x)
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square().div(x.shape[-1]).add(eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        grad = grads[0].to(scale.dtype)
        # y = n w with n = x s: dx = s (g w - n mean(g w n)), dw = sum(g n)
        unit = x * scale
        product = grad * unit
        weight_grad = product.flatten(0, -2).sum(0)
        mean = (product @ weight.to(scale.dtype)).unsqueeze(-1) / x.shape[-1]
        x_grad = (grad * weight).addcmul_(unit, mean, value=-1).mul_(scale)
        return x_grad.to(x.dtype), weight_grad.to(weight.dtype), None


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
        "relu2": lambda x: F.relu(x).square(),
    }
)
"""Elementwise functions by name; `gelu` is the exact form with the error function."""


def activated(activation: Activation, gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Computes the hidden features of a feed-forward layer from the outputs of its first matrices; without `up`, from one."""
    if isinstance(activation, ClampedGate):
        assert up is not None
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
        return (up + activation.shift) * (gate * (activation.slope * gate).sigmoid())
    hidden = ACTIVATIONS[activation](gate)
    return hidden if up is None else hidden * up


STREAM: tuple[Dim, ...] = ("batch", "sequence", "embed")
HIDDEN: tuple[Dim, ...] = ("batch", "sequence", "ffn")


class MLP(nn.Module):
    """down(activation(up(x)))."""

    treats_blocks_alike: ClassVar[bool] = True

    def __init__(self, context: BlockContext, *, activation: Activation, bias: bool = False) -> None:
        super().__init__()
        self.context = context
        self.activation = activation
        self.tapped = "mlp."  # prefix of the names of inner values; shared experts use another one
        self.up_proj = Linear(context.dim, context.ffn_dim, bias)
        self.down_proj = Linear(context.ffn_dim, context.dim, bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, dim) -> (B, T, dim)."""
        hidden = activated(self.activation, tap(self.tapped + "pre_activation", self.up_proj(x)))
        return self.down_proj(tap(self.tapped + "hidden", hidden))

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs of the parameters, by name relative to this module."""
        enter = linear_specs("up_proj", self.up_proj, ("ffn", "embed"), self.context.init_std)
        return enter | linear_specs("down_proj", self.down_proj, ("embed", "ffn"), self.context.output_std)

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the modules whose inputs or outputs a strategy may shard, by name relative to this module."""
        return {
            "": ModuleSpec((STREAM,), (STREAM,)),
            "up_proj": ModuleSpec((STREAM,), (HIDDEN,)),
            "down_proj": ModuleSpec((HIDDEN,), (STREAM,)),
        }


class GatedMLP(MLP):
    """down(activation(gate(x)) * up(x)) (Shazeer, 2020), or down(activation(gate(x), up(x)))."""

    treats_blocks_alike: ClassVar[bool] = True

    def __init__(self, context: BlockContext, *, activation: Activation, bias: bool = False) -> None:
        super().__init__(context, activation=activation, bias=bias)
        self.gate_proj = Linear(context.dim, context.ffn_dim, bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, dim) -> (B, T, dim)."""
        gate = tap(self.tapped + "pre_activation", self.gate_proj(x))
        up = tap(self.tapped + "linear", self.up_proj(x))
        return self.down_proj(tap(self.tapped + "hidden", activated(self.activation, gate, up)))

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs of the parameters, by name relative to this module."""
        gate = linear_specs("gate_proj", self.gate_proj, ("ffn", "embed"), self.context.init_std)
        return gate | super().tensor_specs()

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the modules whose inputs or outputs a strategy may shard, by name relative to this module."""
        return {"gate_proj": ModuleSpec((STREAM,), (HIDDEN,))} | super().module_specs()
