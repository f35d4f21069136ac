"""Gated DeltaNet: a layer that keeps one matrix per head instead of keys and values of all tokens (Yang et al., 2024).

Queries, keys and values pass a causal convolution of a few positions and SiLU, per channel. Queries and keys are normalized to
length 1, and the gated delta rule (`blocks.delta_rule`) reads and writes the state. A norm of each head, times SiLU of a gate
that is projected from the input, precedes the output projection. A document begins with an empty state, and its convolution sees
zeros before it.
"""

from collections.abc import Callable
from functools import partial
from math import sqrt
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.protocols.model import RecurrentCore
from forge_core.specs import Dim, Init, ModuleSpec, TensorSpec
from forge_models.blocks import fla_kernels
from forge_models.blocks.cache import LayerCache
from forge_models.blocks.delta_rule import gated_delta_rule
from forge_models.blocks.layers import Linear, RMSNorm, linear_specs, unfilled
from forge_models.blocks.recurrence import LocalRecurrence, tap_heads
from forge_models.blocks.rope import Rotary, Rotation
from forge_models.blocks.short_conv import HEADS, HeadFilter, widened
from forge_models.inner_values import tap
from forge_models.shape import BlockContext, RecurrentKernel

LENGTH_EPS = 1e-6
"""Added to the square of a length before its root."""
A_RANGE = (0.01, 16.0)
"""Range of the initial decay rates exp(A_log); the lower end keeps their logarithm finite."""
STEP_RANGE = (1e-3, 0.1)
"""Range of the initial softplus(dt_bias) (Gu and Dao, 2023)."""

STREAM: tuple[Dim, ...] = ("batch", "sequence", "embed")


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    skip: Tensor | None,
    documents: Tensor | None,
    state: Tensor | None,
    compute: Callable[..., tuple[Tensor, Tensor]] = gated_delta_rule,
) -> tuple[Tensor, Tensor]:
    """Normalizes queries and keys to length 1 and applies the gated delta rule; see `blocks.recurrence.Rule`."""
    del skip
    q, k = tap_heads("attention.q", unit(q)), tap_heads("attention.k", unit(k))
    return compute(q / sqrt(q.shape[-1]), k, tap_heads("attention.v", v), g, beta, documents=documents, state=state)


def unit(x: Tensor) -> Tensor:
    """Divides (..., width) by its length, in fp32 or wider, rounded once."""
    wide = widened(x)
    return (wide * (wide.square().sum(-1, keepdim=True) + LENGTH_EPS).rsqrt()).to(x.dtype)


class HeadDecay(nn.Module):
    """g = -exp(A_log) * softplus(a + dt_bias), the logarithm of the decay of each head, in fp32 or wider."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.A_log, self.dt_bias = unfilled(heads), unfilled(heads)

    def forward(self, a: Tensor) -> Tensor:
        """(B, T, heads) -> (B, T, heads)."""
        return -widened(self.A_log).exp() * F.softplus(widened(a) + widened(self.dt_bias))

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs: exp(A_log) uniform in `A_RANGE`, softplus(dt_bias) log-uniform in `STEP_RANGE`, as published."""
        rates, steps = Init("log", low=A_RANGE[0], high=A_RANGE[1]), Init("softplus", low=STEP_RANGE[0], high=STEP_RANGE[1])
        return {"A_log": TensorSpec(("state_heads",), rates, "vector"), "dt_bias": TensorSpec(("state_heads",), steps, "vector")}

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the layout: each head by itself."""
        return {"": ModuleSpec((HEADS,), (HEADS,))}


class GatedDeltaNet(nn.Module):
    """The layer; see the module docstring. Parallel strategies replace `core`.

    Each key head serves value_heads / key_heads consecutive value heads. With `negative_eigenvalues`, beta is in (0, 2) instead
    of (0, 1), so that a state can also turn around (Grazzi et al., 2024).
    """

    treats_blocks_alike: ClassVar[bool] = True
    mask_key: ClassVar[str] = "documents"
    """What is prepared for a batch is shared by layers with this key, not by those with the same window."""

    def __init__(
        self,
        context: BlockContext,
        *,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        conv_width: int,
        negative_eigenvalues: bool,
        norm_eps: float,
        kernel: RecurrentKernel = "torch",
    ) -> None:
        super().__init__()
        self.context = context
        self.key_dim, self.value_dim, self.negative_eigenvalues = key_dim, value_dim, negative_eigenvalues
        self.core: RecurrentCore = LocalRecurrence(
            partial(delta_rule, compute=fla_kernels.gated_delta_rule) if kernel == "fla" else delta_rule
        )
        # Unused, but equal to that of attention layers, so that no other rotation is computed.
        self.rotary = Rotary(int(context.head_dim * context.rope.partial), context.rope)
        keys, values = key_heads * key_dim, value_heads * value_dim
        self.q_proj = Linear(context.dim, keys)
        self.k_proj = Linear(context.dim, keys)
        self.v_proj = Linear(context.dim, values)
        self.z_proj = Linear(context.dim, values)
        self.b_proj = Linear(context.dim, value_heads)
        self.a_proj = Linear(context.dim, value_heads)
        self.q_conv = HeadFilter(keys, conv_width)
        self.k_conv = HeadFilter(keys, conv_width)
        self.v_conv = HeadFilter(values, conv_width)
        self.decay = HeadDecay(value_heads)
        self.norm = RMSNorm(value_dim, norm_eps)
        self.o_proj = Linear(values, context.dim)

    def forward(self, x: Tensor, rotation: Rotation, attention_mask: Any, cache: LayerCache | None = None) -> Tensor:
        """(B, T, dim) -> (B, T, dim). `attention_mask` is what the core prepared for this batch; `rotation` is not used."""
        del rotation
        # The number of heads is inferred, because a strategy may have split the projections.
        widths = self.key_dim, self.key_dim, self.value_dim
        made = self.q_conv(self.q_proj(x)), self.k_conv(self.k_proj(x)), self.v_conv(self.v_proj(x))
        q, k, v = (stream.unflatten(-1, (-1, width)) for (stream, *_), width in zip(made, widths, strict=True))
        beta = tap("attention.beta", widened(self.b_proj(x)).sigmoid() * (2.0 if self.negative_eigenvalues else 1.0))
        g = tap("attention.log_decay", self.decay(self.a_proj(x)))
        filters = made[0][1:], made[1][1:], made[2][1:]
        out = self.core.recur((q, k, v), filters, g, beta, attention_mask, cache)
        gate = F.silu(self.z_proj(x)).unflatten(-1, (-1, self.value_dim))
        return self.o_proj(tap_heads("attention.heads", self.norm(out) * gate).flatten(2))

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs of the parameters of linear layers, by name relative to this module."""
        enter: dict[str, TensorSpec] = {}
        for name in ("q_proj", "k_proj", "v_proj", "z_proj", "b_proj", "a_proj"):
            enter |= linear_specs(name, getattr(self, name), ("state_heads", "embed"), self.context.init_std)
        return enter | linear_specs("o_proj", self.o_proj, ("embed", "state_heads"), self.context.output_std)

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the modules whose inputs or outputs a strategy may shard, by name relative to this module."""
        enter = ("q_proj", "k_proj", "v_proj", "z_proj", "b_proj", "a_proj")
        specs = {"": ModuleSpec((STREAM,), (STREAM,)), "o_proj": ModuleSpec((HEADS,), (STREAM,))}
        return specs | {name: ModuleSpec((STREAM,), (HEADS,)) for name in enter}
