"""Routers: (N, dim) tokens -> experts of each token and their weights. Logits are at least fp32.

Losses of a router reach its gradient without leaving the layer. A step minimizes

    sum of nll / D  +  sum over layers and losses of  weight * L / N

with D the number of labels that have a loss and N the number of tokens that are not padding, both over the whole step: all
micro-batches of all ranks. Papers state these losses as means over tokens; each L is the *sum over tokens*, so that one factor,
the same for all layers, ranks and micro-batches, makes it a mean: `scale` = 1 / N, which the step sets before its first forward.

With c_i the slots of a scope that chose expert i, n the tokens of the scope, k slots per token, E experts, and p the router's
probabilities:

    sequence, micro_batch:  n * E * sum_i (c_i / (k n)) * (sum_t p_ti / n)        1 per token if the load is even
    global_batch:           E * sum_i (C_i / sum_j C_j) * sum_t p_ti              C: loads of the whole step before this one
    pooled:                 n * E * sum_i (sum_l c_li / (L n)) * (sum_l sum_t p_lti / (L n))           over all L layers l
    z:                      sum_t (log sum_i exp(logit_ti))^2

`pooled` is transformers' `load_balancing_loss_func`, which counts slots without dividing by k and joins all layers: for an even
load it is k, once for the model, while `micro_batch` is 1 in every layer. Imbalances of layers that prefer different experts
cancel in it. A coefficient from transformers means the same with `pooled`, but has no exact equivalent in the other losses.

Choices carry no gradient, but probabilities do. Only `micro_batch` and `pooled` depend on how rows are assigned to ranks.
`global_batch` uses the loads of the previous step, because the loads of the current step are known only after its last forward,
when most backwards are done. It therefore needs no communication inside a forward, and has the same value in every layout.
"""

from math import pi
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.specs import Init, TensorSpec
from forge_models.blocks.layers import unfilled, unit_rms
from forge_models.inner_values import tap
from forge_models.shape import Losses, RouterContext, RouterScores


class Routing(NamedTuple):
    """The result of a router.

    Attributes:
        experts: (N, top_k) int64 chosen experts, all different for a token.
        weights: (N, top_k) combine weights, at least fp32, with their graph.
        probabilities: (N, experts) probabilities that losses balance, with their graph; each row sums to 1. None if the router
            has none.
        logits: (N, experts) logits with their graph; None if the router has none.
    """

    experts: Tensor
    weights: Tensor
    probabilities: Tensor | None
    logits: Tensor | None


class Router(Protocol):
    """Protocol of the module that a router component builds; the module also defines `tensor_specs()`."""

    def __call__(self, x: Tensor, tokens: Tensor | None) -> Routing:
        """Routes tokens `x` (N, dim). `tokens` are (N,) int64 ids; None on a pipeline stage that does not have them."""
        ...


@runtime_checkable
class Biased(Protocol):
    """A router that balances the load itself, once per optimizer step."""

    def balance(self, load: Tensor, skip: Tensor) -> None:
        """Updates the router from `load` (experts,) fp64, the tokens of the whole batch that chose each expert. If `skip` is 1,
        nothing changes."""
        ...


class SoftmaxTopK(nn.Module):
    """See `forge_models.components.experts.SoftmaxTopKConfig`."""

    treats_blocks_alike: ClassVar[bool] = True

    def __init__(self, context: RouterContext, *, normalize: bool = True, bias: bool = False) -> None:
        super().__init__()
        self.context, self.normalize = context, normalize
        self.weight = unfilled(context.experts, context.dim)
        self.bias = unfilled(context.experts) if bias else None

    def forward(self, x: Tensor, tokens: Tensor | None) -> Routing:
        """See `Router`."""
        logits = logits_of(x, self.weight, self.bias)
        probabilities = logits.softmax(-1)
        weights, experts = probabilities.topk(self.context.top_k, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routing(experts, weights, probabilities, logits)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs of the weight and, if there is one, the bias."""
        bias = {} if self.bias is None else {"bias": TensorSpec((None,), Init("zeros"), "vector")}
        return {"weight": weight_spec(self.context)} | bias


class NormedTopK(nn.Module):
    """See `forge_models.components.experts.NormedTopKConfig`."""

    treats_blocks_alike: ClassVar[bool] = True

    def __init__(self, context: RouterContext, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.context, self.eps = context, eps
        self.scale = unfilled(context.dim)
        self.weight = unfilled(context.experts, context.dim)
        self.expert_scale = unfilled(context.experts)

    def forward(self, x: Tensor, tokens: Tensor | None) -> Routing:
        """See `Router`."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        logits = logits_of(unit_rms(wide, self.eps) * self.scale * self.context.dim**-0.5, self.weight)
        probabilities = logits.softmax(-1)
        weights, experts = probabilities.topk(self.context.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True) * self.expert_scale.to(weights.dtype)[experts]
        return Routing(experts, weights, probabilities, logits)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs of the weight and of the factors, which start at 1."""
        factors = TensorSpec((None,), Init("ones"), "vector")
        return {"scale": factors, "weight": weight_spec(self.context), "expert_scale": factors}


class SigmoidTopK(nn.Module):
    """See `forge_models.components.experts.SigmoidTopKConfig`. The bias is a buffer that only `balance` changes."""

    bias: Tensor
    updates: Tensor

    treats_blocks_alike: ClassVar[bool] = True

    def __init__(
        self,
        context: RouterContext,
        *,
        scores: RouterScores = "sigmoid",
        normalize: bool = True,
        scaling: float = 1.0,
        n_group: int = 1,
        topk_group: int | None = None,
        bias_rate: float = 1e-3,
        bias_schedule: Literal["constant", "cosine", "warmup"] = "constant",
        bias_steps: int | None = None,
    ) -> None:
        super().__init__()
        self.context, self.normalize, self.scaling = context, normalize, scaling
        self.scores: RouterScores = scores
        self.n_group, self.topk_group = n_group, n_group if topk_group is None else topk_group
        self.bias_rate, self.bias_schedule, self.bias_steps = bias_rate, bias_schedule, bias_steps
        self.weight = unfilled(context.experts, context.dim)
        self.register_buffer("bias", torch.full((context.experts,), torch.nan))
        if self.bias_steps is not None:
            self.register_buffer("updates", torch.full((), -1))

    def forward(self, x: Tensor, tokens: Tensor | None) -> Routing:
        """See `Router`."""
        logits = logits_of(x, self.weight)
        scores = score(self.scores, logits)
        experts = self._choice(scores.detach() + self.bias).topk(self.context.top_k, dim=-1).indices
        return by_score(logits, scores, experts, self.normalize, self.scaling)

    def _choice(self, biased: Tensor) -> Tensor:
        """Returns (N, experts) with -inf outside the best groups."""
        groups, kept = self.n_group, self.topk_group
        if kept == groups:
            return biased
        grouped = biased.unflatten(-1, (groups, -1))
        best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1).topk(kept, dim=-1).indices
        outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
        return grouped.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(-2)

    @torch.no_grad()
    def balance(self, load: Tensor, skip: Tensor) -> None:
        """Updates bias += rate * sign(mean load - load) (Wang et al., 2024); see `Biased`."""
        moves = torch.where(skip > 0, 0.0, 1.0)
        # Counts are integers, so this sign is exact and the same on all ranks.
        direction = (load.sum() - load * len(load)).sign()
        self.bias += (direction * moves * self._rate()).to(self.bias.dtype)
        if self.bias_steps is not None:
            self.updates += moves.to(self.updates.dtype)

    def _rate(self) -> Tensor | float:
        if self.bias_steps is None:
            return self.bias_rate
        done = self.updates.double() / self.bias_steps
        if self.bias_schedule == "cosine":
            return self.bias_rate * 0.5 * (1 + (pi * done.clamp(max=1)).cos())
        return self.bias_rate * (done + 1 / self.bias_steps).clamp(max=1)

    def _apply(self, fn: Any, recurse: bool = True) -> "SigmoidTopK":
        """Keeps the bias at least in fp32 if the module is converted to bf16, which would lose updates of 1e-3."""
        kept = self.bias
        super()._apply(fn, recurse)
        if torch.finfo(self.bias.dtype).bits < torch.finfo(kept.dtype).bits:
            self.bias = kept.to(self.bias.device, torch.promote_types(self.bias.dtype, torch.float32))
        return self

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs of the weight, the bias and, if the bias rate changes, the number of updates."""
        specs = {"weight": weight_spec(self.context), "bias": TensorSpec((None,), Init("zeros"), "vector")}
        return specs | ({"updates": TensorSpec((), Init("zeros"), "vector")} if self.bias_steps is not None else {})


class TopKSigmoid(nn.Module):
    """See `forge_models.components.experts.TopKSigmoidConfig`."""

    treats_blocks_alike: ClassVar[bool] = True

    def __init__(self, context: RouterContext) -> None:
        super().__init__()
        self.context = context
        self.weight = unfilled(context.experts, context.dim)

    def forward(self, x: Tensor, tokens: Tensor | None) -> Routing:
        """See `Router`. Logits are compared, because large ones have equal sigmoids."""
        logits = logits_of(x, self.weight)
        scores, (chosen, experts) = logits.sigmoid(), logits.topk(self.context.top_k, dim=-1)
        return Routing(experts, chosen.sigmoid(), scores / (scores.sum(-1, keepdim=True) + 1e-20), logits)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the spec of the weight."""
        return {"weight": weight_spec(self.context)}


class Hash(nn.Module):
    """See `forge_models.components.experts.HashConfig`. Each (token, expert) pair has a pseudo-random score; the largest win."""

    treats_blocks_alike: ClassVar[bool] = True

    def __init__(self, context: RouterContext, *, seed: int = 0) -> None:
        super().__init__()
        self.context, self.seed = context, seed

    def forward(self, x: Tensor, tokens: Tensor | None) -> Routing:
        """See `Router`.

        Raises:
            ValueError: `tokens` is None.
        """
        if tokens is None:
            raise ValueError("the hash router needs token ids; pass `tokens` to a pipeline stage that starts from hidden states")
        # torch.full fills on the device; a tensor created from a host number would synchronize.
        salt = _mix(torch.full((), self.seed * 1_000_003 + self.context.layer, device=tokens.device))
        experts = _mix(torch.arange(self.context.experts, device=tokens.device) + salt)
        chosen = _mix(_mix(tokens.long() ^ salt).unsqueeze(-1) ^ experts).topk(self.context.top_k, dim=-1).indices
        weights = x.new_full(chosen.shape, 1 / self.context.top_k, dtype=torch.promote_types(x.dtype, torch.float32))
        return Routing(chosen, weights, None, None)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns no specs, because the router has no parameters."""
        return {}


def score(kind: RouterScores, logits: Tensor) -> Tensor:
    """Returns the positive score of each logit; see `forge_models.components.experts.SigmoidTopKConfig.scores`."""
    if kind == "sigmoid":
        return logits.sigmoid()
    # The softplus of a very small logit is 0, where the root has no derivative.
    return F.softplus(logits).clamp(min=torch.finfo(logits.dtype).tiny).sqrt()


def by_score(logits: Tensor, scores: Tensor, experts: Tensor, normalize: bool, scaling: float) -> Routing:
    """Returns the routing to `experts` (N, top_k) with weights that are their `scores`, times `scaling`; with `normalize`, first
    divided by their sum."""
    weights = scores.gather(-1, experts)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    probabilities = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    return Routing(experts, weights * scaling, probabilities, logits)


def logits_of(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns x W^T + bias, (N, experts), at least in fp32."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return tap("router.logits", F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)))


def weight_spec(context: RouterContext) -> TensorSpec:
    """Returns the spec of a router's matrix."""
    # No strategy shards the rows, because every rank routes its own tokens among all experts.
    return TensorSpec((None, "embed"), Init("normal", context.init_std), "router")


def _mix(x: Tensor) -> Tensor:
    """Applies the finalizer of splitmix64 (Steele et al., 2014), a bijection of int64 that mixes all bits."""
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ ((x >> shift) & ((1 << 64 - shift) - 1))) * factor
    return x ^ ((x >> 31) & ((1 << 33) - 1))


class RowIndex(NamedTuple):
    """Rows of tokens that were selected from a batch, whose shape no longer shows the rows.

    Attributes:
        of: (N,) int64 row of each token.
        total: number of rows of the batch, including rows without a token.
    """

    of: Tensor
    total: int


def loads(experts: Tensor, rows: "int | RowIndex", num_experts: int) -> Tensor:
    """Counts the slots of each row that chose each expert: `experts` (N, top_k) -> (rows, num_experts) int64; -1 is not counted.
    If `rows` is a number, all rows have equal length and follow each other."""
    if isinstance(rows, RowIndex):
        bins = rows.of.unsqueeze(1) * (num_experts + 1) + experts.where(experts >= 0, num_experts)
        empty = experts.new_zeros(rows.total * (num_experts + 1))
        return empty.scatter_add_(0, bins.flatten(), torch.ones_like(bins).flatten()).view(rows.total, -1)[:, :num_experts]
    slots = experts.view(rows, -1)
    counted = slots.where(slots >= 0, num_experts)
    return slots.new_zeros(rows, num_experts + 1).scatter_add_(1, counted, torch.ones_like(counted))[:, :num_experts]


def probability_sums(routing: Routing, rows: "int | RowIndex", token_mask: Tensor | None) -> Tensor:
    """Returns (rows, E) with a graph: sums of the probabilities of each row's tokens. `token_mask` (N,) is False for padding."""
    assert routing.probabilities is not None
    probabilities = routing.probabilities
    if token_mask is not None:
        probabilities = probabilities.masked_fill(~token_mask.unsqueeze(1), 0)
    if isinstance(rows, RowIndex):
        # One row at a time, because index_add does not add in the same order on every call on a GPU.
        each = [probabilities.masked_fill((rows.of != row).unsqueeze(1), 0).sum(0) for row in range(rows.total)]
        return torch.stack(each)
    return probabilities.unflatten(0, (rows, -1)).sum(1)


def weighted(
    losses: Losses, routing: Routing, counts: Tensor, sums: Tensor, before: Tensor | None, token_mask: Tensor | None
) -> Tensor:
    """Returns a scalar with a graph: the sum of weight * L over the losses of one layer; the module docstring defines L.

    Args:
        losses: weights of the losses.
        routing: routing of N tokens, one row after the other.
        counts: (rows, E) from `loads`, before any slot was dropped.
        sums: (rows, E) from `probability_sums`.
        before: (E,) loads of the previous step; needed by `global_batch`.
        token_mask: (N,) False for padding; None = no padding.
    """
    assert routing.logits is not None
    experts = counts.shape[1]
    total = sums.new_zeros(())
    if losses.sequence:
        total = total + losses.sequence * _balance(counts, sums).sum()
    if losses.micro_batch:
        total = total + losses.micro_batch * _balance(counts.sum(0), sums.sum(0))
    if losses.global_batch:
        assert before is not None
        shares = before / before.sum().clamp(min=1)
        total = total + losses.global_batch * experts * (shares.to(sums.dtype) * sums.sum(0)).sum()
    if losses.z:
        squares = routing.logits.logsumexp(-1).square()
        total = total + losses.z * (squares if token_mask is None else squares.masked_fill(~token_mask, 0)).sum()
    return total


def pooled(counts: Tensor, sums: Tensor, top_k: int) -> Tensor:
    """Returns (layers,) with a graph: terms whose sum is the loss `pooled`, from (layers, E) loads and probability sums."""
    layers, experts = counts.shape
    # The counts sum to k L n, so E / (L^2 n) equals E k / (L * sum of counts).
    return experts * top_k / (layers * counts.sum().clamp(min=1)) * (sums @ counts.sum(0).to(sums.dtype))


def _balance(counts: Tensor, sums: Tensor) -> Tensor:
    """Returns (...): E / (k n) * sum_i c_i * sum_t p_ti, from (..., E) counts and probability sums; 0 without tokens."""
    # The counts c_i of a scope sum to k n.
    return counts.shape[-1] * (counts * sums).sum(-1) / counts.sum(-1).clamp(min=1)


def entropy(routing: Routing, token_mask: Tensor | None) -> Tensor:
    """Returns a scalar: the sum over tokens of the entropy of their probabilities, in nats; ln E per token if uniform."""
    if routing.probabilities is None:
        return routing.weights.new_zeros(())
    each = torch.special.entr(routing.probabilities.detach()).sum(-1)
    return (each if token_mask is None else each.masked_fill(~token_mask, 0)).sum()
