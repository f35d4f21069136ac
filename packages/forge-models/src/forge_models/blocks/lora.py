"""Low-rank adapters of linear layers and experts (LoRA, Hu et al., 2021; DoRA, Liu et al., 2024).

`attach` gives modules of a model, which is then the frozen base, additional parameters. With W (outputs, inputs), A (rank,
inputs) and B (outputs, rank), a layer computes x W^T + s (x A^T) B^T. DoRA divides each row of W + s B A by its length, which
gets no gradient, and multiplies it by a trained number, the row's magnitude.

Names and logical dimensions of W stay, and those of A and B follow from them. So strategies split an adapter as they split the
layer: where W is split along its outputs, B is, and where it is split along its inputs, A is.
"""

from collections.abc import Callable, Mapping
from math import sqrt
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.specs import Dim, Init, TensorSpec
from forge_models.blocks.layers import Linear, unfilled
from forge_models.blocks.moe.experts import Experts

FACTOR_A, FACTOR_B, MAGNITUDE = "lora_a", "lora_b", "lora_magnitude"
"""Names of an adapter's parameters in a linear layer; in a stack of experts, with the name of the matrix and "_" before."""


class LoRASettings(Protocol):
    """See `forge_models.components.lora.LoRAConfig`."""

    @property
    def rank(self) -> int: ...
    @property
    def scaling(self) -> float: ...
    @property
    def dora(self) -> bool: ...


def factor_specs(
    prefix: str, dims: tuple[Dim, Dim], inputs: int, dora: bool, stack: tuple[Dim, ...] = ()
) -> dict[str, TensorSpec]:
    """Returns the specs of the adapter of a matrix with `dims` (outputs, inputs), by parameter name after `prefix`.

    A starts uniform in (-1, 1) / sqrt(inputs) and B at zero, as in the peft library, so that the adapter changes nothing at
    first. The magnitude starts at one, and is set to the lengths of the base's rows when these are known.
    """
    stacked, (outputs_dim, inputs_dim) = bool(stack), dims
    made = {
        prefix + FACTOR_A: TensorSpec((*stack, None, inputs_dim), Init("uniform", 1 / sqrt(3 * inputs)), "matrix", stacked),
        prefix + FACTOR_B: TensorSpec((*stack, outputs_dim, None), Init("zeros"), "matrix", stacked),
    }
    return made | ({prefix + MAGNITUDE: TensorSpec((outputs_dim,), Init("ones"), "vector")} if dora else {})


class LoRALinear(Linear):
    """A linear layer with an adapter."""

    treats_blocks_alike: ClassVar[bool] = True
    lora_a: Tensor
    lora_b: Tensor
    scaling: float
    dims: tuple[Dim, Dim]
    adapter: tuple[str, ...] = (FACTOR_A, FACTOR_B)
    follows: ClassVar[Mapping[str, int]] = MappingProxyType({FACTOR_A: 1, FACTOR_B: 0, MAGNITUDE: 0})
    """Parameter -> the dimension of the weight along which it is split if the weight is; otherwise it is whole."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # the name in torch
        """(..., inputs) -> (..., outputs)."""
        return super().forward(input) + self.scaling * F.linear(F.linear(input, self.lora_a), self.lora_b)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs of the adapter, by name relative to this module."""
        return factor_specs("", self.dims, self.in_features, MAGNITUDE in self.adapter)


class DoRALinear(LoRALinear):
    """A linear layer with an adapter and a trained length of each row."""

    treats_blocks_alike: ClassVar[bool] = True
    lora_magnitude: Tensor
    adapter: tuple[str, ...] = (FACTOR_A, FACTOR_B, MAGNITUDE)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # the name in torch
        """(..., inputs) -> (..., outputs)."""
        a, b, bias = self.lora_a, self.lora_b, self.bias
        with torch.no_grad():
            length = row_lengths(self.matrix() + self.scaling * (b @ a))
        out = self.unbiased(input) + self.scaling * F.linear(F.linear(input, a), b)
        out = out * (self.lora_magnitude / length)
        return out if bias is None else out + bias

    def unbiased(self, rows: Tensor) -> Tensor:
        """Returns the output of the base without its bias."""
        return F.linear(rows, self.weight)

    def matrix(self) -> Tensor:
        """Returns the weight of the base."""
        return self.weight


def row_lengths(matrix: Tensor) -> Tensor:
    """Returns the Euclidean length of each row, (outputs, inputs) -> (outputs,)."""
    return torch.linalg.vector_norm(matrix, dim=1)


class LoRAExperts(Experts):
    """Stacked experts, each with its own adapter. A matrix without an adapter stays as it is."""

    treats_blocks_alike: ClassVar[bool] = True
    scaling: float
    rank: int
    adapter: tuple[str, ...]

    def project(self, product: Callable[[Tensor, Tensor], Tensor], rows: Tensor, name: str) -> Tensor:
        """See `Experts.project`."""
        out = super().project(product, rows, name)
        if f"{name}_{FACTOR_A}" not in self.adapter:
            return out
        a, b = getattr(self, f"{name}_{FACTOR_A}"), getattr(self, f"{name}_{FACTOR_B}")
        return out + self.scaling * product(product(rows, a), b)

    def widths(self) -> tuple[int, ...]:
        """Returns the lengths of the rows of all products."""
        return *super().widths(), self.rank

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs of the parameters, by name relative to this module."""
        specs = super().tensor_specs()
        for name, spec in list(specs.items()):
            if f"{name}_{FACTOR_A}" in self.adapter:
                expert, *dims = spec.dims
                inputs = self.context.dim if name != "down_proj" else self.context.ffn_dim
                specs |= factor_specs(f"{name}_", (dims[0], dims[1]), inputs, False, (expert,))
        return specs


def matrices_of(model: nn.Module) -> list[str]:
    """Returns the paths, without `.weight`, of the matrices that can have an adapter: linear layers and experts of blocks,
    and the projection of per-layer embeddings."""
    names = []
    for path, module in model.named_modules():
        if path.startswith(("blocks.", "layer_inputs.")) and type(module) in (Linear, nn.Linear):
            names.append(path)
        elif path.startswith("blocks.") and isinstance(module, Experts):
            names += [f"{path}.{name}" for name, stack in module.named_parameters(recurse=False) if stack.dim() == 3]
    return names


def attach(model: nn.Module, names: "tuple[str, ...]", settings: LoRASettings) -> None:
    """Freezes all parameters of a model, and gives the matrices `names` (see `matrices_of`) adapters.

    Args:
        model: a model with `specs()`, on the meta device or with memory; its modules are changed in place.
        names: names of matrices, each once.
        settings: rank, scale and kind.

    Raises:
        ValueError: a matrix has no spec.
    """
    specs = model.specs().tensors  # type: ignore[operator]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name in names:
        path, _, last = name.rpartition(".")
        owner: Any = model.get_submodule(path)
        if isinstance(owner, Experts):
            _attach_to_experts(owner, last, settings)
            continue
        layer: Any = model.get_submodule(name)
        spec = specs.get(f"{name}.weight")
        if spec is None:
            raise ValueError(f"{name}.weight has no TensorSpec, so its adapter cannot be described; add one to specs()")
        layer.__class__ = DoRALinear if settings.dora else LoRALinear
        layer.scaling, layer.dims = settings.scaling, spec.dims
        layer.lora_a = factor(layer.weight, settings.rank, layer.in_features)
        layer.lora_b = factor(layer.weight, layer.out_features, settings.rank)
        if settings.dora:
            layer.lora_magnitude = factor(layer.weight, layer.out_features)


def _attach_to_experts(experts: Any, name: str, settings: LoRASettings) -> None:
    count, outputs, inputs = getattr(experts, name).shape
    before = experts.adapter if isinstance(experts, LoRAExperts) else ()
    experts.__class__ = LoRAExperts
    experts.scaling, experts.rank = settings.scaling, settings.rank
    experts.adapter = (*before, f"{name}_{FACTOR_A}", f"{name}_{FACTOR_B}")
    setattr(experts, f"{name}_{FACTOR_A}", factor(experts.up_proj, count, settings.rank, inputs))
    setattr(experts, f"{name}_{FACTOR_B}", factor(experts.up_proj, count, outputs, settings.rank))


def factor(like: Tensor, *shape: int) -> nn.Parameter:
    """Returns a parameter of an adapter of the dtype and device of `like`, filled with NaN until it is initialized."""
    with torch.device(like.device):
        return nn.Parameter(unfilled(*shape).detach().to(like.dtype))


def adapter_names(model: nn.Module) -> tuple[str, ...]:
    """Returns the global names of all parameters of adapters, in the order of the modules."""
    return tuple(f"{path}.{slot}" for path, module in model.named_modules() for slot in getattr(module, "adapter", ()))
