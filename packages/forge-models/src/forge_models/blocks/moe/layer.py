"""A layer of experts, which replaces the feed-forward layer of a block."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.protocols.model import ExpertDispatcher
from forge_core.specs import Dim, Init, ModuleSpec, TensorSpec
from forge_models.autograd import attach
from forge_models.blocks.layers import MLP, STREAM, Linear, linear_specs, unfilled
from forge_models.blocks.moe.dispatch import LocalDispatch, limited
from forge_models.blocks.moe.experts import Experts
from forge_models.blocks.moe.routers import Biased, RowIndex, entropy, loads, pooled, probability_sums, weighted
from forge_models.inner_values import tap
from forge_models.shape import BlockContext, Losses, MoEShape, RouterContext


class Totals(NamedTuple):
    """Statistics of one layer, each a sum over the tokens that are not padding; fp64, on the device.

    Attributes:
        load: (experts,) number of slots that chose each expert, before any was dropped.
        dropped: (experts,) number of slots dropped because of capacity.
        tokens: scalar number of tokens.
        entropy: scalar entropy of the router's probabilities, in nats.
        loss: scalar weighted sum of the router's losses.
    """

    load: Tensor
    dropped: Tensor
    tokens: Tensor
    entropy: Tensor
    loss: Tensor

    @classmethod
    def of(cls, packed: Tensor) -> "Totals":
        """Unpacks the vector (2 * experts + 3,) that is reduced over ranks."""
        experts = (len(packed) - 3) // 2
        load, dropped, rest = packed.split([experts, experts, 3])
        return cls(load, dropped, *rest.unbind())


BRANCH_NORMS = ("shared_norm", "shared_post_norm", "experts_norm", "experts_post_norm")
"""Names of the norms of shared and of chosen experts."""
LATENT: tuple[Dim, ...] = ("batch", "sequence", None)


class ExpertLayer(nn.Module):
    """shared(x) + sum over the chosen experts e of weight_e * expert_e(x). With a `shared_gate` w, the first term is
    sigmoid(w x) * shared(x). With `branch_norms`, it is n2(shared(n1(x))) + n4(sum of weight_e * expert_e(n3(x))), with norms n.
    With `weigh_inputs`, the terms of the sum are expert_e(weight_e * x). With a `latent_dim`, the chosen experts have this width:
    the sum is latent_out(sum of weight_e * expert_e(latent_in(x))), while router and shared experts read x (Nemotron 3, 2025).

    It is a `forge_core.protocols.model.Observer`: its forwards count routed tokens, and once per optimizer step the router
    balances itself with the counts of all ranks. Parallel strategies replace `dispatch`. A forward returns its router statistics
    instead of accumulating them, so that recomputed forwards are not counted twice.
    """

    treats_blocks_alike: ClassVar[bool] = True
    load: Tensor

    def __init__(self, shape: MoEShape, mlp: Any, context: BlockContext) -> None:
        super().__init__()
        self.shape = shape
        router: Any = shape.router
        self.router: nn.Module = router.build(RouterContext.of(context, shape.experts, shape.top_k))
        own, bias = replace(context, ffn_dim=shape.ffn_dim), getattr(mlp, "bias", False)
        width = context.dim if shape.latent_dim is None else shape.latent_dim
        inner: Dim = "embed" if shape.latent_dim is None else None
        self.experts = Experts(replace(own, dim=width), shape.experts, mlp.activation, mlp.gated, shape.kernel, bias, inner)
        self.latent_in = None if shape.latent_dim is None else Linear(context.dim, width, bias)
        self.latent_out = None if shape.latent_dim is None else Linear(width, context.dim, bias)
        # N experts that process every token equal one with N times the width, because their outputs are summed.
        shared = shape.shared * shape.ffn_dim
        self.shared: nn.Module | None = mlp.build(replace(context, ffn_dim=shared)) if shared else None
        if isinstance(self.shared, MLP):
            self.shared.tapped = "shared."
        self.shared_gate = unfilled(1, context.dim) if shape.shared_gate else None
        norm: Any = context.norm
        for name in BRANCH_NORMS:
            self.register_module(name, norm.build(context.dim) if shape.branch_norms else None)
        # A table of experts does not follow losses that balance it, which would only change the weights.
        self.losses = shape.losses if getattr(self.router, "chooses", True) else Losses(z=shape.losses.z)
        self.init_std, self.output_std = context.init_std, context.output_std
        self.dispatch: ExpertDispatcher = LocalDispatch()
        if self.losses.global_batch:
            self.register_buffer("load", torch.full((shape.experts,), -1))
        self._scale: Tensor | None = None
        self._router_stats: Tensor | None = None
        self.totals: Totals | None = None

    def forward(
        self,
        x: Tensor,
        token_mask: Tensor | None = None,
        tokens: Tensor | None = None,
        cached: bool = False,
        rows: RowIndex | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T, dim) -> ((B, T, dim), router statistics for `observe`; None in evaluation).

        Args:
            x: hidden states.
            token_mask: (B, T) False for padding, which no expert processes; None = no padding.
            tokens: (B, T) token ids, for routers that need them.
            cached: whether a cache is used; nothing is dropped then, because the result must not depend on how tokens are split
                into forwards.
            rows: rows that the loss `sequence` balances, if they are not the rows of `x`.
        """
        shape = self.shape
        flat, mask = x.flatten(0, -2), None if token_mask is None else token_mask.flatten()
        routing = self.router(flat, None if tokens is None else tokens.flatten())
        tap("router.experts", routing.experts)  # for reading only; edit the logits to change the choice
        routing = routing._replace(weights=tap("router.weights", routing.weights))
        experts = routing.experts if mask is None else routing.experts.where(mask.unsqueeze(1), -1)
        drops = shape.capacity is not None and not cached
        kept = limited(experts, routing.weights, shape.capacity or 0, shape.experts) if drops else experts
        slots = None if drops or mask is not None else experts.numel()
        if shape.branch_norms:
            y = self._apart(x, kept, routing.weights, slots)
        else:
            y = self._chosen(x, kept, routing.weights, slots, self._shared_output(x))
        if not self.training:
            return y, None
        by_row = x.shape[0] if rows is None else rows
        counts, loss = loads(experts, by_row, shape.experts), None
        pooled_sums: list[Tensor] = []
        if self.losses.any():
            before = self.load if self.losses.global_batch else None
            sums = probability_sums(routing, by_row, mask)
            loss = weighted(self.losses, routing, counts, sums, before, mask)
            y = attach(y, loss, self._scale)
            pooled_sums = [sums.sum(0).double()] if self.losses.pooled else []
        with torch.no_grad():
            seen = torch.full((), flat.shape[0], device=x.device) if mask is None else mask.sum()
            load = counts.sum(0)
            dropped = load - loads(kept, 1, shape.experts)[0] if drops else torch.zeros_like(load)
            scalars = [seen, entropy(routing, mask), loss if loss is not None else load[0] * 0]
            router_stats = torch.cat([load.double(), dropped.double(), torch.stack([value.double() for value in scalars])])
        return y, torch.cat([router_stats, *pooled_sums]) if pooled_sums else router_stats

    def _chosen(
        self, x: Tensor, experts: Tensor, weights: Tensor, slots: int | None, shared: Callable[[], Tensor] | None = None
    ) -> Tensor:
        """Returns the output of the chosen experts plus that of the shared ones, with the shape of `x`."""
        if self.latent_in is None or self.latent_out is None:
            return self._dispatched(x.flatten(0, -2), experts, weights, slots, shared).view_as(x)
        inner = tap("experts.latent", self.latent_in(x))
        flat, apart = inner.flatten(0, -2), []

        def during() -> Tensor:
            # Computed while tokens are under way, but too wide to be added before `latent_out`.
            assert shared is not None
            apart.append(shared())
            return flat.new_zeros(()).expand_as(flat)

        y = self._dispatched(flat, experts, weights, slots, None if shared is None else during).view_as(inner)
        y = self.latent_out(tap("experts.latent_sum", y))
        return y + apart[0].view_as(y) if apart else y

    def _dispatched(
        self, flat: Tensor, experts: Tensor, weights: Tensor, slots: int | None, shared: Callable[[], Tensor] | None = None
    ) -> Tensor:
        """Returns the output of the chosen experts plus that of the shared ones. To weigh inputs, each choice of an expert is
        dispatched as a token of its own, which is its weight times the token."""
        run, count = self.experts, self.shape.experts
        if not self.shape.weigh_inputs:
            return self.dispatch(flat, experts, weights, run, count, slots, shared)
        rows = (flat.unsqueeze(1) * weights.unsqueeze(2)).to(flat.dtype).flatten(0, 1)
        each, ones = experts.reshape(-1, 1), torch.ones_like(weights).view(-1, 1)
        if weights.shape[1] == 1:
            return self.dispatch(rows, each, ones, run, count, slots, shared)
        y = self.dispatch(rows, each, ones, run, count, slots).view(*weights.shape, -1).sum(1)
        return y if shared is None else y + shared()

    def _shared_output(self, x: Tensor) -> Callable[[], Tensor] | None:
        """Returns a function that computes the shared experts' output, to overlap with the exchange of tokens."""
        shared = self.shared
        if shared is None:
            return None
        if self.shared_gate is None:
            return lambda: shared(x).flatten(0, -2)
        gate = tap("shared.gate", F.linear(x, self.shared_gate).sigmoid())
        return lambda: (gate * shared(x)).flatten(0, -2)

    def _apart(self, x: Tensor, experts: Tensor, weights: Tensor, slots: int | None) -> Tensor:
        """Returns the sum of shared and chosen experts, which have norms of their own before and behind them."""
        norms: dict[str, Any] = {name: getattr(self, name) for name in BRANCH_NORMS}
        assert self.shared is not None
        chosen = self._chosen(norms["experts_norm"](x), experts, weights, slots)
        shared = self.shared(norms["shared_norm"](x))
        return norms["shared_post_norm"](shared) + norms["experts_post_norm"](chosen)

    def observe(self, router_stats: Tensor) -> None:
        """Adds the router statistics of a forward to the sum of this step."""
        router_stats = router_stats.detach()[: 2 * self.shape.experts + 3]
        self._router_stats = router_stats if self._router_stats is None else self._router_stats + router_stats

    def before_step(self, scale: Tensor) -> None:
        """See `Observer`."""
        self._scale, self._router_stats = scale, None

    def statistics(self) -> Tensor:
        """See `Observer`; `Totals.of` unpacks the result."""
        if self._router_stats is None:
            device = next(self.parameters()).device
            return torch.zeros(2 * self.shape.experts + 3, dtype=torch.float64, device=device)
        return self._router_stats

    @torch.no_grad()
    def after_step(self, totals: Tensor, skip: Tensor) -> None:
        """See `Observer`."""
        self._router_stats, self.totals = None, Totals.of(totals)
        if isinstance(self.router, Biased):
            self.router.balance(self.totals.load, skip)
        if self.losses.global_batch:
            self.load.copy_(torch.where(skip > 0, self.load, self.totals.load.to(self.load.dtype)))

    def report(self) -> dict[str, Tensor]:
        """See `Observer`. Returns `load` (load of each expert divided by the mean) and its extremes, `entropy` of the router's
        probabilities (nats per token), `dropped` (share of slots dropped because of capacity), `loss` (router losses per token)
        and, if the router has a bias, its extremes."""
        if self.totals is None:
            return {}
        load, dropped, tokens, entropy, loss = self.totals
        relative, tokens = load / load.mean().clamp(min=1e-9), tokens.clamp(min=1)
        found = {"load": relative, "load_max": relative.max(), "load_min": relative.min(), "entropy": entropy / tokens}
        found |= {"dropped": dropped.sum() / load.sum().clamp(min=1), "loss": loss / tokens}
        bias = getattr(self.router, "bias", None)
        return found | ({"bias_max": bias.max(), "bias_min": bias.min()} if isinstance(bias, Tensor) else {})

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs of this module's buffer, gate and latent projections; its other parts describe themselves."""
        specs = {"load": TensorSpec((None,), Init("zeros"), "vector")} if self.losses.global_batch else {}
        if self.shared_gate is not None:
            specs["shared_gate"] = TensorSpec((None, "embed"), Init("normal", self.init_std), "router")
        specs |= linear_specs("latent_in", self.latent_in, (None, "embed"), self.init_std)
        return specs | linear_specs("latent_out", self.latent_out, ("embed", None), self.output_std)

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the layout of the hidden states, the token mask and the token ids, and of norms and latent projections."""
        norms = BRANCH_NORMS if self.shape.branch_norms else ()
        parts: dict[str, ModuleSpec] = {name: ModuleSpec((STREAM,), (STREAM,)) for name in norms}
        if self.latent_in is not None:
            parts |= {"latent_in": ModuleSpec((STREAM,), (LATENT,)), "latent_out": ModuleSpec((LATENT,), (STREAM,))}
        return {"": ModuleSpec((STREAM, STREAM[:2], STREAM[:2]), (STREAM,)), **parts}


def observe_all(x: Tensor, observed: list[tuple[ExpertLayer, Tensor]]) -> Tensor:
    """Passes the router statistics of one forward of the whole model to its layers, and attaches the loss `pooled` to `x`, the
    residual stream, which is returned.

    A single layer cannot do this, because the gradient of its probabilities depends on the loads of later layers.
    """
    shape = observed[0][0].shape if observed else None
    if shape is not None and shape.losses.pooled:
        router_stats = torch.stack([one for _, one in observed])
        counts, sums = router_stats[:, : shape.experts].detach(), router_stats[:, 2 * shape.experts + 3 :]
        shares = shape.losses.pooled * pooled(counts, sums, shape.top_k)
        x = attach(x, shares.sum(), observed[0][0]._scale)
        place = torch.arange(router_stats.shape[1], device=x.device) == 2 * shape.experts + 2
        with torch.no_grad():
            observed = [(layer, one + place * share) for (layer, one), share in zip(observed, shares, strict=True)]
    for layer, router_stats in observed:
        layer.observe(router_stats)
    return x
