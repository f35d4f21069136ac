"""Attention to keys that an indexer chooses (DeepSeek-V3.2, 2025), and the loss that trains the indexer.

The indexer scores key s for query t with a few small heads j, whose keys are shared:

    I_ts = d^-1/2 H^-1/2 * sum_j w_tj ReLU(q_tj . k_s)

with d the width and H the number of its heads. A query attends to the `top_k` visible keys with the highest scores; of equal
scores, the earlier key is chosen. A choice has no gradient, so the indexer learns from a loss of its own. A step minimizes

    sum of nll / D  +  sum over layers of  weight * L / N,      L = sum over tokens t of KL(p_t || softmax(I_t))

with D the number of labels that have a loss and N the number of tokens that are not padding, both over the whole step. p_t is the
sum of the attention weights of all heads, divided by its own sum. Both distributions are over the keys to which the query
attends: the chosen ones, or all visible ones while the indexer warms up. The indexer reads detached inputs, so L trains only the
indexer, and no other loss trains it.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from forge_core.specs import Dim, ModuleSpec, TensorSpec
from forge_models.autograd import attach
from forge_models.blocks.attention import STREAM, mask, visible
from forge_models.blocks.cache import LayerCache
from forge_models.blocks.latent_attention import LATENT, LatentAttention
from forge_models.blocks.layers import LayerNorm, Linear, linear_specs
from forge_models.blocks.rope import Rotation, rotate
from forge_models.shape import BlockContext

KEY_EPS = 1e-6
"""`eps` of the norm of the indexer's keys."""


class ChosenKeys:
    """Attention core of layers in which each query has keys of its own.

    Layers share the mask of visible keys, bool (B or 1, 1, T, S). Each passes the part of it that its indexer chose.
    """

    masked: ClassVar[bool] = True
    """True: `prepare` returns a mask on every device, which a stand-in for the core must return too."""

    def prepare(self, documents: Tensor | None, length: int, window: int | None, device: Any) -> Tensor:
        """Returns the mask of earlier keys of the same document."""
        return mask(documents, length, window, device)

    def prepare_cached(self, slots: Tensor, extent: int, window: int | None) -> Tensor:
        """Returns the mask of queries at `slots` (B, T) over the first `extent` slots of a cache."""
        return visible(slots[:, :, None] - torch.arange(extent, device=slots.device), window).unsqueeze(1)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, shared: Tensor, scale: float) -> Tensor:
        """q and k (B, heads, T or S, head_dim), v (B, heads, S, width) -> (B, heads, T, width)."""
        return F.scaled_dot_product_attention(q, k, v, attn_mask=shared, scale=scale)


class Indexer(nn.Module):
    """Scores every key for every query; see the module docstring. Its first dimensions are rotated, half-split."""

    treats_blocks_alike: ClassVar[bool] = True

    def __init__(self, context: BlockContext, query_width: int, heads: int, head_dim: int) -> None:
        """`query_width` is the width of the latent from which its queries are computed."""
        super().__init__()
        self.init_std, self.heads, self.head_dim = context.init_std, heads, head_dim
        self.q_proj = Linear(query_width, heads * head_dim)
        self.k_proj = Linear(context.dim, head_dim)
        self.k_norm = LayerNorm(head_dim, KEY_EPS)
        self.weights_proj = Linear(context.dim, heads)

    def forward(self, x: Tensor, latent: Tensor, rotation: Rotation, cache: LayerCache | None = None) -> Tensor:
        """x (B, T, dim) and latent (B, T, query_width) -> scores (B, T, S), at least fp32."""
        q = rotate(self.q_proj(latent).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2), rotation)
        k = rotate(self.k_norm(self.k_proj(x)).unsqueeze(1), rotation)
        if cache is not None:
            k = cache.update_index(k)
        wide = torch.promote_types(x.dtype, torch.float32)
        weights = self.weights_proj(x).to(wide) * (self.heads * self.head_dim) ** -0.5
        return index_scores(q.to(wide), k.squeeze(1).to(wide), weights)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the specs of the parameters, by name relative to this module, without those of its norm."""
        return {
            **linear_specs("q_proj", self.q_proj, (None, None), self.init_std),
            **linear_specs("k_proj", self.k_proj, (None, "embed"), self.init_std),
            **linear_specs("weights_proj", self.weights_proj, (None, "embed"), self.init_std),
        }

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the layout of its layers, which every rank holds whole."""
        return {
            "q_proj": ModuleSpec((LATENT,), (LATENT,)),
            "k_proj": ModuleSpec((STREAM,), (LATENT,)),
            "weights_proj": ModuleSpec((STREAM,), (LATENT,)),
        }


# Both functions work on one head at a time, because the products of all heads would be as many squares of the length. They are
# operators, so that selective recomputation, which saves matrix products, does not save these.


@torch.library.custom_op("forge_models::index_scores", mutates_args=())
def index_scores(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """Computes sum_j w_tj ReLU(q_tj . k_s): q (B, H, T, d), k (B, S, d), w (B, T, H) -> (B, T, S)."""
    total = q.new_zeros(q.shape[0], q.shape[2], k.shape[1])
    for head in range(q.shape[1]):
        total += (q[:, head] @ k.transpose(1, 2)).relu_().mul_(w[..., head].unsqueeze(-1))
    return total


@torch.library.custom_op("forge_models::index_scores_backward", mutates_args=())
def index_scores_backward(grad: Tensor, q: Tensor, k: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the gradients of q, k and w from that of `index_scores`."""
    q_grad, k_grad, w_grad = torch.empty_like(q), torch.zeros_like(k), torch.empty_like(w)
    for head in range(q.shape[1]):
        product = (q[:, head] @ k.transpose(1, 2)).relu_()
        w_grad[..., head] = (grad * product).sum(-1)
        inner = grad * w[..., head].unsqueeze(-1) * (product > 0)
        q_grad[:, head] = inner @ k
        k_grad += inner.transpose(1, 2) @ q[:, head]
    return q_grad, k_grad, w_grad


@torch.library.custom_op("forge_models::head_sum", mutates_args=())
def head_sum(q: Tensor, k: Tensor, seen: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
    """Computes the sum of the attention weights of all heads; the arguments are those of `HeadSum`."""
    wide = torch.promote_types(q.dtype, torch.float32)
    total = torch.zeros(q.shape[0], q.shape[2], k.shape[2], dtype=wide, device=q.device)
    for head in range(q.shape[1]):
        scores = (q[:, head] @ k[:, head].transpose(1, 2) * scale).to(wide).masked_fill_(~seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[head].to(wide).expand(*scores.shape[:2], 1)), -1)
        total += scores.softmax(-1)[..., : k.shape[2]]
    return total


@index_scores.register_fake
def _(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    del w
    return q.new_empty(q.shape[0], q.shape[2], k.shape[1])


@index_scores_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    del grad
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(w)


@head_sum.register_fake
def _(q: Tensor, k: Tensor, seen: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
    del seen, scale, sinks
    return q.new_empty(q.shape[0], q.shape[2], k.shape[2], dtype=torch.promote_types(q.dtype, torch.float32))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return index_scores_backward(grad.contiguous(), *ctx.saved_tensors)


index_scores.register_autograd(_differentiate, setup_context=_keep)


class HeadSum(nn.Module):
    """Sum of the attention weights of all heads, without gradient. Strategies that split heads add the sums of all ranks."""

    treats_blocks_alike: ClassVar[bool] = True

    @torch.no_grad()
    def forward(self, q: Tensor, k: Tensor, seen: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        """q (B, heads, T, d), k (B, heads, S, d), seen (B or 1, T, S), True = attended, sinks (heads,) -> (B, T, S), at least
        fp32."""
        return head_sum(q, k, seen, scale, sinks)


class LearnsFromAttention:
    """Base class of attention with an `indexer`, which learns from it with the weight `kl_weight`.

    It is a `forge_core.protocols.model.Observer`: it reports the divergence of its indexer per token. Statistics are returned
    by forwards instead of accumulated, so that recomputed forwards are not counted twice.
    """

    indexer: Any
    kl_weight: float
    _scale: Tensor | None = None
    _statistics: Tensor | None = None
    totals: Tensor | None = None

    def learned(
        self, out: Tensor, target: Tensor, scores: Tensor, seen: Tensor, token_mask: Tensor | None, share: float
    ) -> tuple[Tensor, Tensor]:
        """Returns `out`, whose backward also trains the indexer, and the statistics (2,) for `observe`.

        Args:
            out: output of the attention.
            target: (B, T, S) sums of attention weights over heads, 0 outside of `seen`.
            scores: (B, T, S) scores of the indexer.
            seen: (B or 1, T, S), True = attended.
            token_mask: (B, T) False for padding; None: there is none.
            share: part of all heads that this rank has. Ranks that share the heads compute the same loss, and each contributes
                its part of it.
        """
        sums = target.sum(-1, keepdim=True).clamp(min=torch.finfo(target.dtype).tiny)  # a query may see no keys to choose from
        each = divergence(target / sums, scores, seen)
        if token_mask is not None:
            each = each.masked_fill(~token_mask, 0)
        loss = each.sum() * share
        out = attach(out, self.kl_weight * loss, self._scale)
        with torch.no_grad():
            tokens = torch.full((), each.numel(), device=out.device) if token_mask is None else token_mask.sum()
            return out, torch.stack([loss.double(), tokens.double() * share])

    def observe(self, statistics: Tensor | None) -> None:
        """Adds the statistics of a forward to the sum of this step."""
        if statistics is not None:
            self._statistics = statistics.detach() if self._statistics is None else self._statistics + statistics.detach()

    def before_step(self, scale: Tensor) -> None:
        """See `Observer`."""
        self._scale, self._statistics = scale, None

    def statistics(self) -> Tensor:
        """See `Observer`: the sum over tokens of the divergence in nats, and the number of tokens."""
        if self._statistics is None:
            return torch.zeros(2, dtype=torch.float64, device=next(self.indexer.parameters()).device)
        return self._statistics

    def after_step(self, totals: Tensor, skip: Tensor) -> None:
        """See `Observer`."""
        del skip
        self._statistics, self.totals = None, totals

    def report(self) -> dict[str, Tensor]:
        """See `Observer`. Returns `kl`, the divergence of the indexer from attention in nats per token."""
        return {} if self.totals is None else {"kl": self.totals[0] / self.totals[1].clamp(min=1)}


class IndexedAttention(LearnsFromAttention, LatentAttention):
    """Latent attention to the keys that an indexer chooses. A forward returns its output and the statistics for `observe`."""

    treats_blocks_alike: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("token_mask",)
    observes: ClassVar[bool] = True
    """True: its forward returns a second value for `observe`."""

    def __init__(
        self,
        context: BlockContext,
        *,
        q_lora_rank: int,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        norm: Any,
        index_heads: int,
        index_dim: int,
        top_k: int,
        chooses: bool = True,
        kl_weight: float = 1.0,
    ) -> None:
        """Without `chooses`, queries attend to all visible keys, and the indexer only learns."""
        super().__init__(
            context,
            q_lora_rank=q_lora_rank,
            kv_lora_rank=kv_lora_rank,
            qk_nope_head_dim=qk_nope_head_dim,
            qk_rope_head_dim=qk_rope_head_dim,
            v_head_dim=v_head_dim,
            norm=norm,
        )
        core: Any = ChosenKeys()
        self.core = core
        self.top_k, self.chooses, self.kl_weight = top_k, chooses, kl_weight
        self.indexer = Indexer(context, q_lora_rank, index_heads, index_dim)
        self.head_sum = HeadSum()

    def forward(  # type: ignore[override]  # a second result, which the block passes on
        self,
        x: Tensor,
        rotation: Rotation,
        attention_mask: Tensor,
        cache: LayerCache | None = None,
        token_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T, dim) -> (B, T, dim), and statistics (2,); None in evaluation, and if the indexer is not trained.

        `attention_mask` is the mask that the core prepared for this batch, `token_mask` (B, T) is False for padding.
        """
        latent = self.query_latent(x)
        q, k, v = self.projected(x, latent, rotation, cache)
        scores = self.indexer(x.detach(), latent.detach(), rotation, cache)
        seen = attention_mask.squeeze(1)
        if self.chooses:
            seen = chosen(scores, seen, self.top_k)
        out = self.joined(self.core(q, k, v, seen.unsqueeze(1), self.scale))
        if not (self.training and scores.requires_grad):
            return out, None
        target = self.head_sum(q.detach(), k.detach(), seen, self.scale)
        return self.learned(out, target, scores, seen, token_mask, q.shape[1] / self.context.heads)

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the modules whose inputs or outputs a strategy may shard, by name relative to this module."""
        heads: tuple[Dim, ...] = ("batch", "heads", "sequence", None)
        return super().module_specs() | {"head_sum": ModuleSpec((heads,), (LATENT,))}


def chosen(scores: Tensor, seen: Tensor, top_k: int) -> Tensor:
    """Returns (B, T, S), True for the `top_k` keys with the highest `scores` (B, T, S) among those that `seen` (B or 1, T, S)
    shows; all of them if there are fewer. Of equal scores, which ReLU makes likely, the earlier key is chosen on every device."""
    scores = scores.detach().masked_fill(~seen, float("-inf"))
    least = scores.topk(min(top_k, scores.shape[-1]), dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above, level = scores > least, scores == least
    left = top_k - above.sum(-1, keepdim=True)
    return (above | (level & (level.cumsum(-1) <= left))) & seen


def divergence(target: Tensor, scores: Tensor, seen: Tensor) -> Tensor:
    """Returns (B, T) KL(target || softmax(scores)) in nats over the keys that `seen` (B or 1, T, S) shows, outside of which
    `target` (B, T, S) is 0."""
    logs = scores.masked_fill(~seen, float("-inf")).log_softmax(-1).masked_fill(~seen, 0)
    return (torch.xlogy(target, target) - target * logs).sum(-1)
