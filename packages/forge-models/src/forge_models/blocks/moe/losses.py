"""Losses of a router, and how they reach its gradient without leaving the layer.

A step minimizes

    sum of nll / D  +  sum over layers and losses of  weight * L / N

with D the labels that have a loss and N the tokens that are not padding, both of the whole step: all micro-batches of all
ranks. Each L is a *sum over tokens* of something whose mean is what papers state, so that one factor, the same for all
layers, ranks and micro-batches, makes it a mean: `scale` = 1 / N, which a step hands over before its first forward.

With c_i the slots of a scope that chose expert i, n its tokens, k slots each, E experts, p the router's probabilities:

    sequence, micro_batch:  n * E * sum_i (c_i / (k n)) * (sum_t p_ti / n)        1 per token when the load is even
    global_batch:           E * sum_i (C_i / sum_j C_j) * sum_t p_ti              C: loads of the whole step before this one
    pooled:                 n * E * sum_i (sum_l c_li / (L n)) * (sum_l sum_t p_lti / (L n))           over all L layers l
    z:                      sum_t (log sum_i exp(logit_ti))^2

`pooled` is transformers' `load_balancing_loss_func`, which counts slots without dividing by k and joins all layers: it is k for
an even load, once for the model, where `micro_batch` is 1 in every layer. Layers that prefer different experts balance each
other in it. A coefficient of transformers means the same here with `pooled`, and nothing exact with the others.

Choices carry no gradient, probabilities do. Only `micro_batch` and `pooled` depend on how rows are dealt out. `global_batch`
takes the loads of the step before, because those of this one are known only after its last forward, when most backwards are over;
so it needs no exchange inside a forward, and is the same number in every layout.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from forge_models.blocks.moe.routers import Routing
from forge_models.shape import Losses


class RowIndex(NamedTuple):
    """The rows of tokens that were taken out of a batch, so that the shape no longer shows them.

    Attributes:
        of: (N,) int64, the row of each token.
        total: rows of the batch, those without a token included.
    """

    of: Tensor
    total: int


def loads(experts: Tensor, rows: "int | RowIndex", count: int) -> Tensor:
    """(rows, count) int64: slots of each row of tokens that chose each expert; -1 counts nowhere. `experts` (N, top_k); `rows`
    is a number where rows of equal length follow each other."""
    if isinstance(rows, RowIndex):
        bins = rows.of.unsqueeze(1) * (count + 1) + experts.where(experts >= 0, count)
        empty = experts.new_zeros(rows.total * (count + 1))
        return empty.scatter_add_(0, bins.flatten(), torch.ones_like(bins).flatten()).view(rows.total, -1)[:, :count]
    slots = experts.view(rows, -1)
    counted = slots.where(slots >= 0, count)
    return slots.new_zeros(rows, count + 1).scatter_add_(1, counted, torch.ones_like(counted))[:, :count]


def probability_sums(routing: Routing, rows: "int | RowIndex", token_mask: Tensor | None) -> Tensor:
    """(rows, E) with a graph: the probabilities of each row's tokens, added up. `token_mask` (N,) is False for padding."""
    assert routing.probabilities is not None
    probabilities = routing.probabilities
    if token_mask is not None:
        probabilities = probabilities.masked_fill(~token_mask.unsqueeze(1), 0)
    if isinstance(rows, RowIndex):
        # Row after row: an index_add would not add in the same order on every call, on a GPU.
        each = [probabilities.masked_fill((rows.of != row).unsqueeze(1), 0).sum(0) for row in range(rows.total)]
        return torch.stack(each)
    return probabilities.unflatten(0, (rows, -1)).sum(1)


def weighted(
    losses: Losses, routing: Routing, counts: Tensor, sums: Tensor, before: Tensor | None, token_mask: Tensor | None
) -> Tensor:
    """Scalar with a graph: sum of weight * L over the losses of one layer, see the module.

    Args:
        losses: the weights.
        routing: of N tokens, rows after each other.
        counts: (rows, E) from `loads`, before any slot was dropped.
        sums: (rows, E) from `probability_sums`.
        before: (E,) loads of the step before, where `global_batch` counts.
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
    """(layers,) with a graph: parts whose sum is the loss `pooled` of a forward, from (layers, E) loads and probability sums."""
    layers, experts = counts.shape
    # All counts add up to k L n, so E / (L^2 n) is E k / (L times that).
    return experts * top_k / (layers * counts.sum().clamp(min=1)) * (sums @ counts.sum(0).to(sums.dtype))


def _balance(counts: Tensor, sums: Tensor) -> Tensor:
    """(...): E / (k n) * sum_i c_i * sum_t p_ti of scopes with (..., E) counts and sums of probabilities; 0 without tokens."""
    # c_i adds up to k n for every n.
    return counts.shape[-1] * (counts * sums).sum(-1) / counts.sum(-1).clamp(min=1)


def entropy(routing: Routing, token_mask: Tensor | None) -> Tensor:
    """Scalar: sum over tokens of the entropy of their probabilities, in nats; ln E a token when nothing is preferred."""
    if routing.probabilities is None:
        return routing.weights.new_zeros(())
    each = torch.special.entr(routing.probabilities.detach()).sum(-1)
    return (each if token_mask is None else each.masked_fill(~token_mask, 0)).sum()
