"""Float8 linear layers: a subclass of a layer's class, whose three matrix products are in float8.

Products and casts are torchao's. In addition, ranks that hold parts of one operand, of its features (tensor parallelism) or of
its tokens (context parallelism), cast them with a common scale, so that results equal those of one process. Imports torchao,
which `conversion.require_torchao` must check first.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torchao.float8.config import Float8LinearConfig
from torchao.float8.distributed_utils import tensor_already_casted_to_fp8
from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
from torchao.float8.float8_training_tensor import (
    GemmInputRole,
    LinearMMConfig,
    ScaledMMConfig,
    hp_tensor_and_scale_to_float8,
)
from torchao.float8.float8_utils import amax_to_scale

from forge_core.errors import ForgeError
from forge_parallel.placement.collectives import Ranks
from forge_parallel.placement.shares import FLOAT8_MULTIPLE as MULTIPLE
from forge_parallel.torch_private import functional


@dataclass(frozen=True)
class Casting:
    """The casts of one layer.

    Attributes:
        config: torchao's configuration.
        products: how the three products are computed.
        input, weight, gradient: groups of ranks that hold parts of this operand and share its scale.
    """

    config: Float8LinearConfig
    products: LinearMMConfig
    input: tuple[Ranks, ...] = ()
    weight: tuple[Ranks, ...] = ()
    gradient: tuple[Ranks, ...] = ()

    @classmethod
    def of(cls, recipe: str, emulate: bool) -> "Casting":
        """Returns the casts of a torchao recipe: `tensorwise` (E4M3, gradients E5M2) or `rowwise` (E4M3, power-of-two scales)."""
        config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
        products = (config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight)
        return cls(config, LinearMMConfig(*(ScaledMMConfig(emulate, product.use_fast_accum) for product in products)))

    @property
    def emulated(self) -> bool:
        """Whether products are computed in fp32."""
        return self.config.emulate


class Float8Linear(nn.Linear):
    """Mixed into the class of a linear layer; parameters, hooks and all other methods stay."""

    casting: Casting

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        """(..., inputs) -> (..., outputs), in the dtype of `input`.

        Raises:
            ForgeError: the number of tokens, over which the weight's gradient sums, is not supported by float8 kernels.
        """
        casting, x, weight = self.casting, input, self.weight.t()
        tokens = x.shape[:-1].numel()
        if torch.is_grad_enabled() and not casting.emulated and tokens % MULTIPLE:
            raise ForgeError(
                f"a micro-batch has {tokens} tokens on this rank, but float8 needs a multiple of {MULTIPLE}; choose another "
                "data.sequence_length or train.micro_batch"
            )
        ready = tensor_already_casted_to_fp8(weight)
        ranks = casting.input if ready else tuple(dict.fromkeys((*casting.weight, *casting.input)))
        if ranks:  # a rank with the whole operand computes the same scale as the others
            scales = _scales((x,) if ready else (x, weight), ranks, GemmInputRole.INPUT, casting)
            x = _cast(x, scales[0], GemmInputRole.INPUT, casting)
            weight = weight if ready else _cast(weight, scales[1], GemmInputRole.WEIGHT, casting)
        out: Any = matmul_with_hp_or_float8_args.apply(x, weight, casting.products, casting.config)
        if casting.gradient:
            out = _GradientScale.apply(out, casting)
        bias = self.bias
        return out if bias is None else out + bias.to(out.dtype)


@cache
def float8_class(original: type[nn.Linear]) -> type[nn.Linear]:
    """Returns the converted class of a layer, one per original class, so that compiled blocks share a graph."""
    return type(f"{original.__name__}Float8", (Float8Linear, original), {})


class _GradientScale(torch.autograd.Function):
    """Identity; the backward casts the gradient with the scale of all ranks, so that the product before need not."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, casting: Casting) -> Tensor:
        ctx.casting = casting
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        role, casting = GemmInputRole.GRAD_OUTPUT, ctx.casting
        return _cast(grads[0], _scales(grads, casting.gradient, role, casting)[0], role, casting), None


def _dtype(role: GemmInputRole, casting: Casting) -> torch.dtype:
    config = casting.config
    chosen = config.cast_config_grad_output if role is GemmInputRole.GRAD_OUTPUT else config.cast_config_input
    assert chosen.target_dtype is not None
    return chosen.target_dtype


def _scales(tensors: Sequence[Tensor], groups: Iterable[Ranks], role: GemmInputRole, casting: Casting) -> tuple[Tensor, ...]:
    """Returns the scale of each tensor, of which every rank has a part; one all-reduce per group."""
    largest = torch.stack([tensor.detach().abs().amax() for tensor in tensors])
    for ranks in groups:
        largest = functional.wait_tensor(functional.all_reduce(largest, "max", ranks.name))
    return amax_to_scale(largest, _dtype(role, casting)).unbind()


def _cast(x: Tensor, scale: Tensor, role: GemmInputRole, casting: Casting) -> Tensor:
    return hp_tensor_and_scale_to_float8(x, scale, _dtype(role, casting), casting.products, role)  # type: ignore[return-value]
