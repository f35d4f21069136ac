"""Mamba-2: a layer whose heads keep one matrix each instead of keys and values of all tokens (Dao and Gu, 2024).

The input is projected to x (heads), to B and C (shared by the heads of a group, as keys may be), to steps and to a gate z. x, B
and C pass a causal convolution of a few positions and SiLU, per channel; the selective state space (`blocks.state_space`) reads
and writes the states. A norm over the channels of each group precedes the output projection; SiLU of the gate multiplies before
the norm or after it. A document begins with an empty state, and its convolution sees zeros before it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from forge_core.protocols.model import RecurrentCore
from forge_core.specs import Dim, Init, ModuleSpec, TensorSpec
from forge_models.blocks import fla_kernels
from forge_models.blocks.cache import LayerCache
from forge_models.blocks.layers import Linear, linear_specs, unfilled
from forge_models.blocks.recurrence import LocalRecurrence, tap_heads
from forge_models.blocks.rope import Rotary, Rotation
from forge_models.blocks.short_conv import HEADS, HeadFilter, widened
from forge_models.blocks.state_space import state_space
from forge_models.inner_values import tap
from forge_models.shape import BlockContext, RecurrentKernel

A_RANGE = (1.0, 16.0)
"""Range of the initial decay rates exp(A_log)."""
STEP_RANGE = (1e-3, 0.1)
"""Range of the initial softplus(dt_bias)."""

STREAM: tuple[Dim, ...] = ("batch", "sequence", "embed")
ENTER = ("z_proj", "x_proj", "b_proj", "c_proj", "dt_proj")
"""Projections of the residual stream."""


def selective_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    skip: Tensor | None,
    documents: Tensor | None,
    state: Tensor | None,
    compute: Callable[..., tuple[Tensor, Tensor]] = state_space,
) -> tuple[Tensor, Tensor]:
    """Applies the selective state space; see `blocks.recurrence.Rule`."""
    assert skip is not None
    q, k, v = tap_heads("attention.q", q), tap_heads("attention.k", k), tap_heads("attention.v", v)
    return compute(q, k, v, g, beta, skip, documents=documents, state=state)


class HeadSteps(nn.Module):
    """The step softplus(dt + dt_bias) of each head, limited; the logarithm -exp(A_log) * step of its decay, in fp32 or wider; and
    the factor D of its skip."""

    def __init__(self, heads: int, low: float, high: float | None) -> None:
        super().__init__()
        self.A_log, self.dt_bias, self.D = unfilled(heads), unfilled(heads), unfilled(heads)
        self.low, self.high = low, high

    def forward(self, dt: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, heads) -> steps and logarithms of decays (B, T, heads), and D (heads,)."""
        step = F.softplus(widened(dt) + widened(self.dt_bias))
        if self.low > 0 or self.high is not None:
            step = step.clamp(self.low, self.high)
        return step, -widened(self.A_log).exp() * step, self.D

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs: exp(A_log) uniform in `A_RANGE`, softplus(dt_bias) log-uniform in `STEP_RANGE`, D one, as
        published."""
        rates, steps = Init("log", low=A_RANGE[0], high=A_RANGE[1]), Init("softplus", low=STEP_RANGE[0], high=STEP_RANGE[1])
        inits = {"A_log": rates, "dt_bias": steps, "D": Init("ones")}
        return {name: TensorSpec(("state_heads",), init, "vector") for name, init in inits.items()}

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the layout: each head by itself."""
        return {"": ModuleSpec((HEADS,), (HEADS, HEADS))}


class GatedGroupNorm(nn.Module):
    """RMSNorm over the channels of each group, times SiLU of a gate, in fp32, rounded once.

    With `gate_first` it is the norm of x * silu(z), otherwise the norm of x, times silu(z).
    """

    def __init__(self, width: int, groups: int, eps: float, gate_first: bool) -> None:
        super().__init__()
        self.weight = unfilled(groups * width)
        self.width, self.eps, self.gate_first = width, eps, gate_first

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """(B, T, groups * width), twice -> the same in the dtype of `z`."""
        if torch.compiler.is_compiling():  # a compiler fuses the plain formula and derives its backward
            wide, gate = widened(x), F.silu(widened(z))
            wide = wide * gate if self.gate_first else wide
            parts = wide.unflatten(-1, (-1, self.width))
            normed = (parts * (parts.square().mean(-1, keepdim=True) + self.eps).rsqrt()).flatten(-2) * self.weight
            return (normed if self.gate_first else normed * gate).to(z.dtype)
        return _GatedGroupNorm.apply(x, z, self.weight, self.width, self.eps, self.gate_first)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the spec of the weight, which starts at 1."""
        return {"weight": TensorSpec(("state_heads",), Init("ones"), "vector")}

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the layout: each group by itself."""
        return {"": ModuleSpec((HEADS, HEADS), (HEADS,))}


class _GatedGroupNorm(torch.autograd.Function):
    """The norm without the tensors that autograd would keep for each of its factors."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor, weight: Tensor, width: int, eps: float, gate_first: bool) -> Tensor:
        wide, gate = widened(x), F.silu(widened(z))
        parts = (wide * gate if gate_first else wide).unflatten(-1, (-1, width))
        scale = torch.linalg.vector_norm(parts, dim=-1, keepdim=True).square().div(width).add(eps).rsqrt()
        ctx.save_for_backward(x, z, weight, scale)
        ctx.width, ctx.gate_first = width, gate_first
        normed = (parts * scale).flatten(-2).mul_(weight)
        return (normed if gate_first else normed.mul_(gate)).to(z.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, z, weight, scale = ctx.saved_tensors
        wide, wide_z, grad = widened(x), widened(z), widened(grads[0])
        sigmoid = wide_z.sigmoid()
        gate = wide_z * sigmoid
        slope = sigmoid.addcmul_(gate, 1 - sigmoid)  # SiLU' = s + x s (1 - s)
        unit = ((wide * gate if ctx.gate_first else wide).unflatten(-1, (-1, ctx.width)) * scale).flatten(-2)
        outer = grad if ctx.gate_first else grad * gate  # gradient of the weighted norm
        weight_grad = (outer * unit).flatten(0, -2).sum(0)
        inner = (outer * weight).unflatten(-1, (-1, ctx.width))
        parts = unit.unflatten(-1, (-1, ctx.width))
        mean = (inner * parts).mean(-1, keepdim=True)
        normed_grad = ((inner - parts * mean) * scale).flatten(-2)
        if ctx.gate_first:
            x_grad, z_grad = normed_grad * gate, normed_grad.mul_(wide).mul_(slope)
        else:
            x_grad, z_grad = normed_grad, (grad * unit).mul_(weight).mul_(slope)
        return x_grad.to(x.dtype), z_grad.to(z.dtype), weight_grad.to(weight.dtype), None, None, None


class StateSpaceMixer(nn.Module):
    """The layer; see the module docstring. Parallel strategies replace `core`. Each of `groups` B and C serves heads / groups
    consecutive heads."""

    treats_blocks_alike: ClassVar[bool] = True
    mask_key: ClassVar[str] = "documents"
    """What is prepared for a batch is shared by layers with this key, not by those with the same window."""

    def __init__(
        self,
        context: BlockContext,
        *,
        heads: int,
        head_dim: int,
        groups: int,
        state_dim: int,
        conv_width: int,
        conv_bias: bool,
        bias: bool,
        gate_first: bool,
        step_min: float,
        step_max: float | None,
        norm_eps: float,
        kernel: RecurrentKernel = "torch",
    ) -> None:
        super().__init__()
        self.context = context
        self.head_dim, self.state_dim = head_dim, state_dim
        self.core: RecurrentCore = LocalRecurrence(
            partial(selective_scan, compute=fla_kernels.state_space_scan) if kernel == "fla" else selective_scan
        )
        # Unused, but equal to that of attention layers, so that no other rotation is computed.
        self.rotary = Rotary(int(context.head_dim * context.rope.partial), context.rope)
        values, keys = heads * head_dim, groups * state_dim
        self.z_proj = Linear(context.dim, values, bias)
        self.x_proj = Linear(context.dim, values, bias)
        self.b_proj = Linear(context.dim, keys, bias)
        self.c_proj = Linear(context.dim, keys, bias)
        self.dt_proj = Linear(context.dim, heads, bias)
        self.x_conv = HeadFilter(values, conv_width, conv_bias)
        self.b_conv = HeadFilter(keys, conv_width, conv_bias)
        self.c_conv = HeadFilter(keys, conv_width, conv_bias)
        self.steps = HeadSteps(heads, step_min, step_max)
        self.norm = GatedGroupNorm(values // groups, groups, norm_eps, gate_first)
        self.o_proj = Linear(values, context.dim, bias)

    def forward(self, x: Tensor, rotation: Rotation, attention_mask: Any, cache: LayerCache | None = None) -> Tensor:
        """(B, T, dim) -> (B, T, dim). `attention_mask` is what the core prepared for this batch; `rotation` is not used."""
        del rotation
        # The number of heads is inferred, because a strategy may have split the projections.
        widths = self.state_dim, self.state_dim, self.head_dim
        made = self.c_conv(self.c_proj(x)), self.b_conv(self.b_proj(x)), self.x_conv(self.x_proj(x))
        streams = [stream.unflatten(-1, (-1, width)) for (stream, *_), width in zip(made, widths, strict=True)]
        step, g, skip = self.steps(self.dt_proj(x))
        step, g = tap("attention.beta", step), tap("attention.log_decay", g)
        filters = made[0][1:], made[1][1:], made[2][1:]
        out = self.core.recur(streams, filters, g, step, attention_mask, cache, skip)
        normed = self.norm(out.flatten(2), self.z_proj(x)).unflatten(-1, (-1, self.head_dim))
        return self.o_proj(tap_heads("attention.heads", normed).flatten(2))

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs of the parameters of linear layers, by name relative to this module."""
        enter: dict[str, TensorSpec] = {}
        for name in ENTER:
            enter |= linear_specs(name, getattr(self, name), ("state_heads", "embed"), self.context.init_std)
        return enter | linear_specs("o_proj", self.o_proj, ("embed", "state_heads"), self.context.output_std)

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the modules whose inputs or outputs a strategy may shard, by name relative to this module."""
        specs = {"": ModuleSpec((STREAM,), (STREAM,)), "o_proj": ModuleSpec((HEADS,), (STREAM,))}
        return specs | {name: ModuleSpec((STREAM,), (HEADS,)) for name in ENTER}
