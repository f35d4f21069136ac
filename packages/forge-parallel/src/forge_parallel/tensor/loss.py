"""Cross-entropy over a vocabulary that is split over ranks: no rank ever holds the logits of the whole.

Rows are taken in chunks. Of each chunk every rank computes its share of the logits c and three numbers a row: their maximum m,
s = sum(exp(c - m)), and the logit of the label where it has it. One exchange of these gives all ranks the log partition
function L = M + log(sum(s * exp(m - M))), M the largest m, and so the loss; with softmax = exp(c - L) the gradients of the own
share follow as in one process: d loss / d c = softmax * (1 + 2 * z_loss * L) - onehot(y).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge_core.batch import IGNORE
from forge_parallel.tensor.collectives import Ranks, all_gather

LOGITS = 2**24
"""Logits of one chunk on one rank at most, unless that is fewer than 256 rows."""


@dataclass(frozen=True)
class SplitCrossEntropy:
    """A `forge_core.protocols.model.LossHead` for this rank's rows `first` .. of the output projection."""

    ranks: Ranks
    first: int

    def __call__(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float, soft_cap: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(total with graph, nll, z): the same on all ranks. The gradient of `hidden` is this rank's summand.

        Args:
            hidden: (N, embed), the same on all ranks.
            weight: (this rank's share of vocab, embed).
            labels: (N,) int64 over the whole vocabulary; `IGNORE` = no loss.
            z_loss: weight of the squared log partition function.
            soft_cap: logits become soft_cap * tanh(logits / soft_cap) when given.
        """
        if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
            return _SplitCrossEntropy.apply(hidden, weight, labels, z_loss, soft_cap, self)
        return _chunked(hidden, weight, labels, z_loss, soft_cap, self, gradients=False)[0]


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        z_loss: float,
        soft_cap: float | None,
        place: SplitCrossEntropy,
    ) -> tuple[Tensor, Tensor, Tensor]:
        sums, hidden_grad, weight_grad = _chunked(hidden, weight, labels, z_loss, soft_cap, place, gradients=True)
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.dtype = weight.dtype
        ctx.mark_non_differentiable(*sums[1:])
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden_grad, weight_grad = ctx.saved_tensors
        return hidden_grad * grads[0], (weight_grad * grads[0]).to(ctx.dtype), *(None,) * 4


def _chunked(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    z_loss: float,
    soft_cap: float | None,
    place: SplitCrossEntropy,
    gradients: bool,
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None, Tensor | None]:
    """The three sums; with `gradients` also those of the total with respect to `hidden` (a summand) and `weight`."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    rows = max(256, min(512, LOGITS // weight.shape[0]))
    nll = torch.zeros((), dtype=wide, device=hidden.device)
    z = torch.zeros_like(nll)
    hidden_grad = torch.empty_like(hidden) if gradients else None
    weight_grad = torch.zeros_like(weight, dtype=wide) if gradients else None
    for start in range(0, hidden.shape[0], rows):
        x, label = hidden[start : start + rows], labels[start : start + rows]
        logits = torch.mm(x, weight.T).to(wide)
        slope = None
        if soft_cap is not None:
            bounded = (logits / soft_cap).tanh()
            slope, logits = 1 - bounded.square(), bounded * soft_cap
        valid = label != IGNORE
        index = label - place.first
        here = valid & (index >= 0) & (index < weight.shape[0])
        index = index.where(here, 0).unsqueeze(1)
        chosen = logits.gather(1, index).squeeze(1) * here
        top = logits.amax(1)
        logits = logits.sub_(top.unsqueeze(1)).exp_()
        tops, sums, picked = all_gather(torch.stack((top, logits.sum(1), chosen))[None], place.ranks, 0).unbind(1)
        highest = tops.amax(0)
        partition = (sums * (tops - highest).exp()).sum(0)
        log_partition = highest + partition.log()
        nll += ((log_partition - picked.sum(0)) * valid).sum()
        z += (log_partition.square() * valid).sum()
        if hidden_grad is None or weight_grad is None:
            continue
        factor = valid * (1 + 2 * z_loss * log_partition) * (top - highest).exp() / partition
        logits.mul_(factor.unsqueeze(1)).scatter_add_(1, index, -here.to(wide).unsqueeze(1))
        if slope is not None:
            logits.mul_(slope)
        narrow = logits.to(hidden.dtype)
        torch.mm(narrow, weight, out=hidden_grad[start : start + rows])
        weight_grad += torch.mm(narrow.T, x)
    return (nll + z_loss * z, nll, z), hidden_grad, weight_grad
