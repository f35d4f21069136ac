"""Float8 linear layers, and weights that FSDP gathers in float8. Imports torchao; `conversion.require_torchao` checks it first.

`Float8Linear` is a subclass of a layer's class, whose three matrix products are in float8. Products and casts are torchao's. In
addition, ranks that hold parts of one operand, of its features (tensor parallelism) or of its tokens (context parallelism), cast
them with a common scale, so that results equal those of one process.

`Float8Shard` is a weight that FSDP shards in the dtype of the state and gathers in float8, half the bytes of bf16. This subclass
wraps the rank's shard (`plain`), because FSDP asks the tensor how to gather it. The result equals, bit for bit, a weight that is
gathered in the compute dtype and then cast: rounded to that dtype first, with one scale for the whole weight.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torchao.float8.config import Float8LinearConfig
from torchao.float8.distributed_utils import tensor_already_casted_to_fp8
from torchao.float8.float8_linear import matmul_with_hp_or_float8_args
from torchao.float8.float8_training_tensor import (
    Float8TrainingTensor,
    GemmInputRole,
    LinearMMConfig,
    ScaledMMConfig,
    hp_tensor_and_scale_to_float8,
)
from torchao.float8.float8_utils import amax_to_scale

from forge_core.errors import ForgeError
from forge_parallel.placement.collectives import Ranks
from forge_parallel.placement.shares import FLOAT8_MULTIPLE as MULTIPLE
from forge_parallel.torch_private import (
    TO_COPY,
    disabled_torch_function,
    float8_numbers,
    foreach_norm,
    functional,
    local_part,
    make_wrapper_subclass,
    tree_map_only,
)


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


aten = torch.ops.aten
KEEPING = frozenset(
    {
        TO_COPY,
        aten.as_strided.default,
        aten.clone.default,
        aten.copy_.default,
        aten.detach.default,
        aten.empty_like.default,
        aten.new_empty.default,
        aten.new_zeros.default,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.view.default,
    }
)
"""Operators that allocate, split and move tensors: their results are wrapped again. All others compute on `plain`."""


@dataclass(frozen=True)
class Gathering:
    """How the weights of a part are gathered.

    Attributes:
        casting: casts of their layers.
        compute: dtype to which they are rounded first.
        groups: groups of ranks that hold parts of the same matrix: those of FSDP and of tensor parallelism.
    """

    casting: Casting
    compute: torch.dtype
    groups: tuple[dist.ProcessGroup, ...]

    @property
    def dtype(self) -> torch.dtype:
        """dtype in which weights are exchanged."""
        dtype = self.casting.config.cast_config_weight.target_dtype
        assert dtype is not None
        return dtype

    def scales(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the scale of each whole weight, (n,) fp32, from this rank's parts. One all-reduce per group."""
        filled = [part for part in parts if part.numel()]
        norms, nothing = iter(foreach_norm(filled, inf) if filled else ()), parts[0].new_zeros(())
        largest = torch.stack([next(norms) if part.numel() else nothing for part in parts])
        for group in self.groups:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        # Rounding is monotonic, so the largest value rounded is the largest rounded value.
        return amax_to_scale(largest.to(self.compute), self.dtype)


@dataclass(eq=False)
class GatheredWeight:
    """State shared by all tensors that FSDP derives from one weight. FSDP slices and pads it differently often on each rank, and
    ranks must agree on whether `scale` is known: from a step's first forward to its last backward, when no weight changes."""

    gathering: Gathering
    scale: Tensor | None = None


def look_ahead(part: nn.Module) -> None:
    """Computes the scales of all weights of a part that are sharded now; gathered ones need no scale."""
    parts = [local_part(p) for p in part.parameters() if isinstance(p, DTensor)]
    shards = [local for local in parts if isinstance(local, Float8Shard)]
    if shards:
        scales = shards[0].weight.gathering.scales([shard.plain for shard in shards])
        for shard, scale in zip(shards, scales, strict=True):
            shard.weight.scale = scale


class Float8Shard(Tensor):
    """A rank's shard of a weight."""

    plain: Tensor
    weight: GatheredWeight

    __torch_function__ = disabled_torch_function

    @staticmethod
    def __new__(cls, plain: Tensor, weight: GatheredWeight) -> "Float8Shard":
        self = make_wrapper_subclass(
            cls,
            plain.size(),
            strides=plain.stride(),
            storage_offset=plain.storage_offset(),
            dtype=plain.dtype,
            device=plain.device,
            requires_grad=plain.requires_grad,
        )
        self.plain, self.weight = plain, weight
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Float8Shard({self.plain!r})"

    def __tensor_flatten__(self) -> tuple[list[str], GatheredWeight]:
        return ["plain"], self.weight

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], weight: GatheredWeight, size: Any, stride: Any) -> "Float8Shard":
        return Float8Shard(inner["plain"], weight)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        weights: list[GatheredWeight] = []

        def unwrapped(shard: "Float8Shard") -> Tensor:
            weights.append(shard.weight)
            return shard.plain

        args, kwargs = tree_map_only(Float8Shard, unwrapped, (args, kwargs or {}))
        out = func(*args, **kwargs)
        if func not in KEEPING:
            return out
        return tree_map_only(Tensor, lambda plain: Float8Shard(plain, weights[0]), out)

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Returns the tensor to send, as bytes because not every backend supports float8, and the scale."""
        kind, scale = self.weight.gathering, self.weight.scale
        scale = kind.scales([self.plain])[0] if scale is None else scale
        rounded = self.plain.to(kind.compute)
        cast: Any = hp_tensor_and_scale_to_float8(rounded, scale, kind.dtype, kind.casting.products, GemmInputRole.WEIGHT)
        sent = float8_numbers(cast).view(torch.uint8)
        rows = -(-outer_size[0] // mesh.size())
        if sent.shape[0] < rows:  # the last shards may be shorter
            sent = torch.cat((sent, sent.new_zeros(rows - sent.shape[0], *sent.shape[1:])))
        return (sent,), (scale,)

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], kept: tuple[Tensor, ...], dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """Returns the whole weight in float8 and its memory; with `out`, updates the scale of the existing weight."""
        (data,), (scale,) = gathered, kept
        if out is not None:
            there: Any = local_part(out) if isinstance(out, DTensor) else out
            there._scale = scale
            return None
        kind = self.weight.gathering
        whole = Float8TrainingTensor(data.view(kind.dtype), scale, dtype, kind.casting.products, GemmInputRole.WEIGHT)
        return whole, (data,)
