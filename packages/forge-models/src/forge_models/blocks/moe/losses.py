"""Losses of a router, and how they reach its gradient without leaving the layer.

A step minimizes

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

from typing import NamedTuple

import torch
from torch import Tensor

from forge_models.blocks.moe.routers import Routing
from forge_models.shape import Losses


class RowIndex(NamedTuple):
    """Rows of tokens that were selected from a batch, whose shape no longer shows the rows.

    Attributes:
        of: (N,) int64 row of each token.
        total: number of rows of the batch, including rows without a token.
    """

    of: Tensor
    total: int


def loads(experts: Tensor, rows: "int | RowIndex", count: int) -> Tensor:
    """Counts the slots of each row that chose each expert: `experts` (N, top_k) -> (rows, count) int64; -1 is not counted. If
    `rows` is a number, all rows have equal length and follow each other."""
    if isinstance(rows, RowIndex):
        bins = rows.of.unsqueeze(1) * (count + 1) + experts.where(experts >= 0, count)
        empty = experts.new_zeros(rows.total * (count + 1))
        return empty.scatter_add_(0, bins.flatten(), torch.ones_like(bins).flatten()).view(rows.total, -1)[:, :count]
    slots = experts.view(rows, -1)
    counted = slots.where(slots >= 0, count)
    return slots.new_zeros(rows, count + 1).scatter_add_(1, counted, torch.ones_like(counted))[:, :count]


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
