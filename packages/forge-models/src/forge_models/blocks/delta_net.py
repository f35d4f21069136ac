"""Gated DeltaNet: a layer that keeps one matrix per head instead of keys and values of all tokens (Yang et al., 2024).

Queries, keys and values pass a causal convolution of a few positions and SiLU, per channel. Queries and keys are normalized to
length 1, and the gated delta rule (`blocks.delta_rule`) reads and writes the state. A norm of each head, times SiLU of a gate
that is projected from the input, precedes the output projection. A document begins with an empty state, and its convolution sees
zeros before it.
"""

from math import sqrt
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from forge_core.protocols.model import RecurrentCore
from forge_core.specs import Dim, Init, ModuleSpec, TensorSpec
from forge_models.blocks.cache import LayerCache
from forge_models.blocks.delta_rule import document_runs, gated_delta_rule
from forge_models.blocks.layers import Linear, RMSNorm, linear_specs, unfilled
from forge_models.blocks.rope import Rotary, Rotation
from forge_models.inner_values import tap
from forge_models.shape import BlockContext

LENGTH_EPS = 1e-6
"""Added to the square of a length before its root."""
A_RANGE = (0.01, 16.0)
"""Range of the initial decay rates exp(A_log); the lower end keeps their logarithm finite."""
STEP_RANGE = (1e-3, 0.1)
"""Range of the initial softplus(dt_bias) (Gu and Dao, 2023)."""

STREAM: tuple[Dim, ...] = ("batch", "sequence", "embed")
HEADS: tuple[Dim, ...] = ("batch", "sequence", "state_heads")


def causal_filter(x: Tensor, filters: Tensor, runs: Tensor | None = None) -> Tensor:
    """Returns SiLU of sum over s of filters[:, -1 - s] * x[:, t - s], (B, T, channels), in fp32 or wider, rounded once.

    Args:
        x: (B, T, channels).
        filters: (channels, width).
        runs: (B, T) number of the document of each position (`document_runs`); positions of other documents count as zeros, as do
            those before the row. None: each row is one document.
    """
    if torch.compiler.is_compiling():  # a compiler fuses the plain formula and derives its backward
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        total = wide * filters[:, -1]
        for s in range(1, min(filters.shape[1], x.shape[1])):
            earlier = wide[:, :-s] * filters[:, -1 - s]
            total = total + F.pad(earlier if runs is None else earlier * _same(runs, s), (0, 0, s, 0))
        return F.silu(total).to(x.dtype)
    return _Filter.apply(x, filters, runs)


def _same(runs: Tensor, s: int) -> Tensor:
    """(B, T - s, 1): whether positions t and t - s have the same document."""
    return (runs[:, s:] == runs[:, :-s]).unsqueeze(-1)


class _Filter(torch.autograd.Function):
    """The convolution without the tensors that autograd would keep for each of its terms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, filters: Tensor, runs: Tensor | None) -> Tensor:
        wide, taps = _widened(x), _widened(filters)
        total = wide * taps[:, -1]
        for s in range(1, min(taps.shape[1], x.shape[1])):
            earlier = wide[:, :-s] if runs is None else wide[:, :-s] * _same(runs, s)
            total[:, s:].addcmul_(earlier, taps[:, -1 - s])
        ctx.save_for_backward(x, filters, runs, total)
        return F.silu(total).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, filters, runs, total = ctx.saved_tensors
        wide, taps = _widened(x), _widened(filters)
        gate = total.sigmoid()
        grad = gate.addcmul(total * gate, 1 - gate).mul_(grads[0])  # SiLU' = s + x s (1 - s)
        x_grad, filters_grad = grad * taps[:, -1], torch.zeros_like(taps)
        filters_grad[:, -1] = torch.einsum("btc,btc->c", grad, wide)
        for s in range(1, min(taps.shape[1], x.shape[1])):
            later = grad[:, s:] if runs is None else grad[:, s:] * _same(runs, s)
            x_grad[:, :-s].addcmul_(later, taps[:, -1 - s])
            filters_grad[:, -1 - s] = torch.einsum("btc,btc->c", later, wide[:, :-s])
        return x_grad.to(x.dtype), filters_grad.to(filters.dtype), None


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class LocalRecurrence:
    """Convolution, normalization and delta rule over whole rows on one device, with or without a cache."""

    def prepare(self, documents: Tensor | None, length: int, window: int | None, device: Any) -> Tensor | None:
        """Returns the number of the document of each position, (B, T); None if each row is one document."""
        del length, window, device
        return None if documents is None else document_runs(documents)

    def prepare_cached(self, slots: Tensor, extent: int, window: int | None) -> None:
        """Prepares nothing: the cache has the state."""
        del slots, extent, window

    def recur(
        self,
        streams: tuple[Tensor, Tensor, Tensor],
        filters: tuple[Tensor, Tensor, Tensor],
        g: Tensor,
        beta: Tensor,
        shared: Tensor | None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Returns the outputs of all heads, (B, T, heads, value width); see `RecurrentCore`."""
        state: Tensor | None = None
        after: list[Tensor] = []
        flat = tuple(x.flatten(2) for x in streams)
        if cache is None:
            made = [causal_filter(x, weight, shared) for x, weight in zip(flat, filters, strict=True)]
        else:
            before, state = cache.recurrent
            made, counts = [], cache.counts(g.shape[1])
            valid = (torch.arange(g.shape[1], device=g.device) < counts[:, None]).unsqueeze(-1)
            g, beta = g.where(valid, 0.0), beta.where(valid, 0.0)  # padding leaves the state as it is
            for index, (x, weight) in enumerate(zip(flat, filters, strict=True)):
                width = weight.shape[1] - 1
                earlier = x.new_zeros(x.shape[0], width, x.shape[2]) if before is None else before[index]
                joined = torch.cat((earlier, x), 1)
                made.append(causal_filter(joined, weight)[:, width:])
                places = counts[:, None] + torch.arange(width, device=x.device)
                after.append(joined.gather(1, places.unsqueeze(-1).expand(-1, -1, x.shape[2])))
        heads = [x.unflatten(-1, stream.shape[2:]) for x, stream in zip(made, streams, strict=True)]
        q, k, v = tap_heads("attention.q", unit(heads[0])), tap_heads("attention.k", unit(heads[1])), heads[2]
        out, state = gated_delta_rule(
            q / sqrt(q.shape[-1]), k, tap_heads("attention.v", v), g, beta, documents=shared, state=state
        )
        if cache is not None:
            cache.recurrent = tuple(after), state
        return out


def unit(x: Tensor) -> Tensor:
    """Divides (..., width) by its length, in fp32 or wider, rounded once."""
    wide = _widened(x)
    return (wide * (wide.square().sum(-1, keepdim=True) + LENGTH_EPS).rsqrt()).to(x.dtype)


def tap_heads(name: str, x: Tensor) -> Tensor:
    """Taps (B, T, heads, width) with heads before positions, as attention does."""
    return tap(name, x.transpose(1, 2)).transpose(1, 2)


class HeadFilter(nn.Module):
    """Filters (channels, width) of the convolution of queries, keys or values. The core, which has whole rows, applies them."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = unfilled(channels, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, channels) -> the same, and its filters (channels, width)."""
        return x, self.weight

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the spec of the filters: uniform with a bound of 1 / sqrt(width), as torch initializes convolutions."""
        return {"weight": TensorSpec(("state_heads", None), Init("uniform", 1 / sqrt(3 * self.weight.shape[1])), "vector")}

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the layout: each head by itself."""
        return {"": ModuleSpec((HEADS,), (HEADS,))}


class HeadDecay(nn.Module):
    """g = -exp(A_log) * softplus(a + dt_bias), the logarithm of the decay of each head, in fp32 or wider."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.A_log, self.dt_bias = unfilled(heads), unfilled(heads)

    def forward(self, a: Tensor) -> Tensor:
        """(B, T, heads) -> (B, T, heads)."""
        return -_widened(self.A_log).exp() * F.softplus(_widened(a) + _widened(self.dt_bias))

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
    ) -> None:
        super().__init__()
        self.context = context
        self.key_dim, self.value_dim, self.negative_eigenvalues = key_dim, value_dim, negative_eigenvalues
        self.core: RecurrentCore = LocalRecurrence()
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
        q, k, v = (stream.unflatten(-1, (-1, width)) for (stream, _), width in zip(made, widths, strict=True))
        beta = tap("attention.beta", _widened(self.b_proj(x)).sigmoid() * (2.0 if self.negative_eigenvalues else 1.0))
        g = tap("attention.log_decay", self.decay(self.a_proj(x)))
        filters = made[0][1], made[1][1], made[2][1]
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
