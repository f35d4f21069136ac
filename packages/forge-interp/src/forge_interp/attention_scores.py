"""Attention scores and patterns, recomputed from queries and keys; the model's own kernels and results do not change."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forge_core.batch import PADDING
from forge_core.protocols.model import PositionedTokens
from forge_interp.captures import listening_to
from forge_interp.selection import ForwardInputs
from forge_interp.tap_names import InterpError, choose, layer_of, taps
from forge_models.blocks.attention import LocalAttention, placed_mask
from forge_models.inner_values import is_from

QUERY_CHUNK = 256
"""Number of queries processed at a time for results that do not need the whole matrix of scores."""


@dataclass(frozen=True)
class ScoreRule:
    """Rule by which a layer computes attention weights from queries and keys.

    Attributes:
        scale: factor of the products q k^T.
        soft_cap: bound of the scores; None: no bound.
        window: number of positions that a position attends to; None: all.
        sinks: (heads,) score of each head that enters the softmax and has no key; None: there is none.
        causal: whether a position attends only to itself and earlier ones.
    """

    scale: float
    soft_cap: float | None
    window: int | None
    sinks: Tensor | None = None
    causal: bool = True


class AttentionScores:
    """Queries and keys of the latest forward. Scores are computed on request, for the requested heads and queries.

    All results are in fp32, or fp64 for a model in fp64. `heads` are query heads, `queries` are positions in the row; None = all.
    Each key head serves heads / kv_heads query heads.
    """

    def __init__(
        self,
        rules: dict[int, ScoreRule],
        kept: dict[str, Tensor] | None = None,
        documents: Tensor | None = None,
        token_mask: Tensor | None = None,
    ) -> None:
        """
        Args:
            rules: score rule by layer.
            kept: (B, heads, T, head_dim) values of each `blocks.N.attention.q` and `.k`.
            documents: (B, T) document of each token; None = each row is one document.
            token_mask: (B, T) bool, False for padding; None = padding is known from `documents`, or there is none.
        """
        self._rules = rules
        self._kept = {} if kept is None else kept
        self._documents, self._token_mask = documents, token_mask

    @property
    def layers(self) -> list[int]:
        """Layers with stored queries and keys."""
        return list(self._rules)

    def scores(self, layer: int, heads: Sequence[int] | None = None, queries: Sequence[int] | range | None = None) -> Tensor:
        """Returns (B, heads, queries, T): scale * q k^T, capped if the model caps; -inf for keys that a query does not see.

        Raises:
            InterpError: the layer, head or query does not exist, or no forward ran.
        """
        q, k, at = self._chosen(layer, heads, queries)
        rule = self._rules[layer]
        scores = (q @ k.transpose(-1, -2)) * rule.scale
        if rule.soft_cap is not None:
            scores = rule.soft_cap * (scores / rule.soft_cap).tanh()
        everywhere = torch.arange(k.shape[2], device=k.device)
        documents = self._documents
        if documents is None and not rule.causal and self._token_mask is not None:
            documents = self._token_mask.int() - 1
        mine = PositionedTokens(at, None if documents is None else documents[:, at])
        seen = placed_mask(mine, PositionedTokens(everywhere, documents), rule.window, rule.causal)
        return scores.masked_fill(~seen, float("-inf"))

    def pattern(self, layer: int, heads: Sequence[int] | None = None, queries: Sequence[int] | range | None = None) -> Tensor:
        """Returns (B, heads, queries, T): the softmax of `scores`; rows sum to 1, or to less if heads have sinks."""
        scores = self.scores(layer, heads, queries)
        return self._with_sinks(layer, heads, scores).softmax(-1)[..., : scores.shape[-1]]

    def _with_sinks(self, layer: int, heads: Sequence[int] | None, scores: Tensor) -> Tensor:
        """Appends the sinks of a layer, if it has any, to scores (B, heads, queries, T)."""
        sinks = self._rules[layer].sinks
        if sinks is None:
            return scores
        chosen = sinks if heads is None else sinks[list(heads)]
        return torch.cat((scores, chosen.to(scores).view(-1, 1, 1).expand(*scores.shape[:-1], 1)), dim=-1)

    def entropy(self, layer: int, heads: Sequence[int] | None = None, queries: Sequence[int] | range | None = None) -> Tensor:
        """Returns (B, heads, queries) entropies - sum p ln p in nats, sinks included: 0 if a query sees only one key, NaN for
        padding."""
        return torch.cat(
            [
                _entropy(self._with_sinks(layer, heads, part)).masked_fill(~real, float("nan"))
                for part, real in self._parts(layer, heads, queries)
            ],
            2,
        )

    def max_logit(self, layer: int, heads: Sequence[int] | None = None, queries: Sequence[int] | range | None = None) -> Tensor:
        """Returns (heads,): the largest score over all rows and queries except padding, after the cap and before the softmax."""
        parts = [
            part.masked_fill(~real[..., None], float("-inf")).amax((0, 2, 3)) for part, real in self._parts(layer, heads, queries)
        ]
        return torch.stack(parts).amax(0)

    def _parts(
        self, layer: int, heads: Sequence[int] | None, queries: Sequence[int] | range | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the scores of `QUERY_CHUNK` queries at a time, and the (B, 1, queries) bool mask without padding."""
        places = list(range(self._length(layer)) if queries is None else queries)
        for start in range(0, len(places), QUERY_CHUNK):
            some = places[start : start + QUERY_CHUNK]
            scores = self.scores(layer, heads, some)
            real = scores.new_ones((len(scores), 1, len(some)), dtype=torch.bool)
            if self._documents is not None:
                real &= self._documents[:, None, some] != PADDING
            if self._token_mask is not None:
                real &= self._token_mask[:, None, some]
            yield scores, real

    def _length(self, layer: int) -> int:
        if layer not in self._rules:
            raise InterpError(f"layer {layer} was not kept; kept: {', '.join(map(str, self._rules))}")
        if not self._kept:
            raise InterpError("no queries and keys were kept: no forward ran inside of the context")
        return self._kept[f"blocks.{layer}.attention.q"].shape[2]

    def _chosen(
        self, layer: int, heads: Sequence[int] | None, queries: Sequence[int] | range | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        length = self._length(layer)
        q, k = (self._kept[f"blocks.{layer}.attention.{one}"] for one in "qk")
        wide = torch.promote_types(q.dtype, torch.float32)
        count, shared = q.shape[1], q.shape[1] // k.shape[1]
        picked = list(range(count) if heads is None else heads)
        at = list(range(length) if queries is None else queries)
        if wrong := [head for head in picked if not 0 <= head < count]:
            raise InterpError(f"head {wrong[0]} of layer {layer} does not exist: it has {count}, from 0 to {count - 1}")
        if wrong := [place for place in at if not 0 <= place < length]:
            raise InterpError(f"query {wrong[0]} is beyond the {length} tokens of a row")
        if not picked or not at:
            raise InterpError("heads and queries must not be empty; leave them out for all")
        places = torch.tensor(at, device=q.device)
        keys = k[:, [head // shared for head in picked]]
        return q[:, picked].index_select(2, places).to(wide), keys.to(wide), places


@contextmanager
def capture_qk(model: nn.Module, layers: Sequence[int] | None = None) -> Iterator[AttentionScores]:
    """Context that keeps the queries and keys, after norm and rotation, of the latest forward (2 B T heads head_dim numbers per
    layer, not B heads T^2). The model computes the same bits as without it.

    Args:
        layers: numbers of blocks; negative ones count from the end; None = all.

    Raises:
        InterpError: the attention has no known rule, a strategy has replaced its core, or a forward has a cache.
    """
    wanted = choose(taps(model), ("attention.q", "attention.k"), range(_count(model)) if layers is None else layers)
    kept = sorted({layer for name in wanted if (layer := layer_of(name)) is not None})
    found = AttentionScores({layer: rule_of(model, layer) for layer in kept})

    def note(forward: ForwardInputs | None) -> None:
        if forward is None:
            return
        if forward.cached:
            raise InterpError("scores are of whole rows, and this forward has a cache; run the model without one")
        found._kept.clear()
        found._documents, found._token_mask = forward.documents, forward.token_mask

    def hear(name: str, x: Tensor) -> None:
        if name in wanted and is_from(model):
            found._kept[name] = x.detach().clone()

    with listening_to(model, hear, note):
        yield found


def _count(model: nn.Module) -> int:
    return len(getattr(model, "blocks", ()))


def rule_of(model: nn.Module, layer: int) -> ScoreRule:
    """Returns how a layer of a model, or of a part of a model, computes attention weights.

    Raises:
        InterpError: the attention is unknown, or a strategy has replaced its core.
    """
    attention: Any = model.get_submodule(f"blocks.{layer}.attention")
    core = getattr(attention, "core", None)
    if not isinstance(core, LocalAttention):
        raise InterpError(
            f"blocks.{layer}.attention: its core is {type(core).__name__}; scores can be recomputed for LocalAttention "
            "only, which computes softmax(q k^T * scale) over whole rows in one process"
        )
    if getattr(attention, "chunk", None) is not None:
        raise InterpError(f"blocks.{layer}.attention has chunks (attention.chunk), whose scores cannot be recomputed")
    if not isinstance(getattr(attention, "scale", None), float):
        raise InterpError(f"blocks.{layer}.attention has no `scale`, so its scores cannot be recomputed")
    sinks = getattr(attention, "sinks", None)
    return ScoreRule(
        attention.scale,
        getattr(attention, "soft_cap", None),
        getattr(attention, "window", None),
        None if sinks is None else sinks.detach(),
        core.causal,
    )


def _entropy(scores: Tensor) -> Tensor:
    logs = scores.log_softmax(-1)
    return -(logs.exp() * logs.masked_fill(logs == float("-inf"), 0)).sum(-1)


@torch.no_grad()
def induction_scores(model: nn.Module, tokens: Tensor) -> Tensor:
    """Returns (layers, heads): the attention from a token of the second copy to the token after its first occurrence (Olsson et
    al., 2022), averaged over rows and positions.

    Args:
        tokens: (B, 2 n): each row is a sequence of n random tokens, repeated once.

    Raises:
        InterpError: a row is not a repeated sequence.
    """
    half = tokens.shape[1] // 2
    if tokens.shape[1] != 2 * half or not torch.equal(tokens[:, :half], tokens[:, half:]) or half < 2:
        raise InterpError("each row must be a sequence of tokens twice, such as torch.cat((x, x), 1), to measure induction")
    with capture_qk(model) as kept:
        model(tokens)
    queries = torch.arange(half, 2 * half)
    found = []
    for layer in kept.layers:
        pattern = kept.pattern(layer, queries=queries.tolist())
        keys = (queries - half + 1).to(pattern.device).expand(*pattern.shape[:2], -1).unsqueeze(3)
        found.append(pattern.gather(3, keys).mean((0, 2, 3)))
    return torch.stack(found)
