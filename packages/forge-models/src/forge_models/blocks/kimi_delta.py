"""Kimi Delta Attention: Gated DeltaNet with a decay for each channel of the keys (Kimi Team, 2025, "Kimi Linear").

Queries, keys and values pass a causal convolution of a few positions and SiLU, per channel. Queries and keys are normalized to
length 1, and the delta rule (`blocks.channel_delta`) reads and writes the state. Decays, and a gate on the outputs, come from
pairs of matrices of low rank. A norm of each head, times the sigmoid of the gate, precedes the output projection. A document
begins with an empty state, and its convolution sees zeros before it.
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
from forge_models.blocks.channel_delta import channel_delta_rule
from forge_models.blocks.delta_net import STEP_RANGE, unit
from forge_models.blocks.layers import Linear, RMSNorm, linear_specs, unfilled
from forge_models.blocks.recurrence import LocalRecurrence, tap_heads
from forge_models.blocks.rope import Rotary, Rotation
from forge_models.blocks.short_conv import HEADS, HeadFilter, widened
from forge_models.inner_values import tap
from forge_models.shape import BlockContext, RecurrentKernel

A_RANGE = (1.0, 16.0)
"""Range of the initial decay rates exp(A_log)."""

STREAM: tuple[Dim, ...] = ("batch", "sequence", "embed")
LOW: tuple[Dim, ...] = ("batch", "sequence", None)
ENTER = ("q_proj", "k_proj", "v_proj", "b_proj")
"""Projections of the residual stream to heads."""
PAIRS = ("f", "g")
"""Pairs of matrices of low rank: of decays, and of the gate."""


def kimi_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    skip: Tensor | None,
    documents: Tensor | None,
    state: Tensor | None,
    compute: Callable[..., tuple[Tensor, Tensor]] = channel_delta_rule,
) -> tuple[Tensor, Tensor]:
    """Normalizes queries and keys to length 1 and applies the delta rule; see `blocks.recurrence.Rule`."""
    del skip
    q, k = tap_heads("attention.q", unit(q)), tap_heads("attention.k", unit(k))
    v = tap_heads("attention.v", v)
    return compute(q / sqrt(q.shape[-1]), k, v, g, beta, documents=documents, state=state)


class ChannelDecay(nn.Module):
    """g = -exp(A_log) * softplus(a + dt_bias), the logarithm of the decay of each channel, in fp32 or wider; A_log differs by
    head."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.A_log, self.dt_bias = unfilled(heads), unfilled(heads * width)
        self.width = width

    def forward(self, a: Tensor) -> Tensor:
        """(B, T, heads * width) -> the same."""
        steps = F.softplus(widened(a) + widened(self.dt_bias)).unflatten(-1, (-1, self.width))
        return (-widened(self.A_log).exp().unsqueeze(-1) * steps).flatten(2)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs: exp(A_log) uniform in `A_RANGE`, softplus(dt_bias) log-uniform in `STEP_RANGE`, as published."""
        rates, steps = Init("log", low=A_RANGE[0], high=A_RANGE[1]), Init("softplus", low=STEP_RANGE[0], high=STEP_RANGE[1])
        return {"A_log": TensorSpec(("state_heads",), rates, "vector"), "dt_bias": TensorSpec(("state_heads",), steps, "vector")}

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the layout: each head by itself."""
        return {"": ModuleSpec((HEADS,), (HEADS,))}


class KimiDelta(nn.Module):
    """The layer; see the module docstring. Parallel strategies replace `core`."""

    treats_blocks_alike: ClassVar[bool] = True
    mask_key: ClassVar[str] = "documents"
    """What is prepared for a batch is shared by layers with this key, not by those with the same window."""

    def __init__(
        self,
        context: BlockContext,
        *,
        heads: int,
        head_dim: int,
        conv_width: int,
        norm_eps: float,
        kernel: RecurrentKernel = "torch",
    ) -> None:
        super().__init__()
        self.context = context
        self.head_dim = head_dim
        self.core: RecurrentCore = LocalRecurrence(
            partial(kimi_rule, compute=fla_kernels.channel_delta_rule) if kernel == "fla" else kimi_rule
        )
        # Unused, but equal to that of attention layers, so that no other rotation is computed.
        self.rotary = Rotary(int(context.head_dim * context.rope.partial), context.rope)
        width = heads * head_dim
        self.q_proj = Linear(context.dim, width)
        self.k_proj = Linear(context.dim, width)
        self.v_proj = Linear(context.dim, width)
        self.b_proj = Linear(context.dim, heads)
        self.f_a_proj = Linear(context.dim, head_dim)
        self.f_b_proj = Linear(head_dim, width)
        self.g_a_proj = Linear(context.dim, head_dim)
        self.g_b_proj = Linear(head_dim, width)
        self.q_conv = HeadFilter(width, conv_width)
        self.k_conv = HeadFilter(width, conv_width)
        self.v_conv = HeadFilter(width, conv_width)
        self.decay = ChannelDecay(heads, head_dim)
        self.norm = RMSNorm(head_dim, norm_eps)
        self.o_proj = Linear(width, context.dim)

    def forward(self, x: Tensor, rotation: Rotation, attention_mask: Any, cache: LayerCache | None = None) -> Tensor:
        """(B, T, dim) -> (B, T, dim). `attention_mask` is what the core prepared for this batch; `rotation` is not used."""
        del rotation
        # The number of heads is inferred, because a strategy may have split the projections.
        made = self.q_conv(self.q_proj(x)), self.k_conv(self.k_proj(x)), self.v_conv(self.v_proj(x))
        streams = [stream.unflatten(-1, (-1, self.head_dim)) for stream, *_ in made]
        beta = tap("attention.beta", widened(self.b_proj(x)).sigmoid())
        g = self.decay(self.f_b_proj(self.f_a_proj(x))).unflatten(-1, (-1, self.head_dim))
        g = tap_heads("attention.log_decays", g)
        filters = made[0][1:], made[1][1:], made[2][1:]
        out = self.core.recur(streams, filters, g, beta, attention_mask, cache)
        gate = self.g_b_proj(self.g_a_proj(x)).sigmoid().unflatten(-1, (-1, self.head_dim))
        return self.o_proj(tap_heads("attention.heads", self.norm(out) * gate).flatten(2))

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs of the parameters of linear layers, by name relative to this module."""
        std = self.context.init_std
        found: dict[str, TensorSpec] = {}
        for name in ENTER:
            found |= linear_specs(name, getattr(self, name), ("state_heads", "embed"), std)
        for pair in PAIRS:
            found |= linear_specs(f"{pair}_a_proj", getattr(self, f"{pair}_a_proj"), (None, "embed"), std)
            found |= linear_specs(f"{pair}_b_proj", getattr(self, f"{pair}_b_proj"), ("state_heads", None), std)
        return found | linear_specs("o_proj", self.o_proj, ("embed", "state_heads"), self.context.output_std)

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the modules whose inputs or outputs a strategy may shard, by name relative to this module."""
        specs = {"": ModuleSpec((STREAM,), (STREAM,)), "o_proj": ModuleSpec((HEADS,), (STREAM,))}
        specs |= {name: ModuleSpec((STREAM,), (HEADS,)) for name in ENTER}
        for pair in PAIRS:
            specs |= {f"{pair}_a_proj": ModuleSpec((STREAM,), (LOW,)), f"{pair}_b_proj": ModuleSpec((LOW,), (HEADS,))}
        return specs
