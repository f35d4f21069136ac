"""Cross-entropy over a vocabulary that is split over ranks: no rank ever holds the logits of the whole.

Rows are taken in chunks. Of each chunk every rank computes its share of the logits c and three numbers a row: their maximum m,
s = sum(exp(c - m)), and the logit of the label where it has it. One exchange of these gives all ranks the log partition
function L = M + log(sum(s * exp(m - M))), M the largest m, and so the loss; with softmax = exp(c - L) the gradients of the own
share follow as in one process: d loss / d c = softmax * (1 + 2 * z_loss * L) - onehot(y).
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge_core.batch import IGNORE
from forge_core.logits import block_rows, chunk_rows
from forge_parallel.placement.collectives import Ranks, all_gather


@dataclass(frozen=True)
class SplitCrossEntropy:
    """A `forge_core.protocols.model.LossHead` for this rank's rows `first` .. of the output projection."""

    ranks: Ranks
    first: int

    def __call__(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float, soft_cap: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(total with graph, nll (N,), z (N,)): the same on all ranks. The gradient of `hidden` is this rank's summand.

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
        losses, hidden_grad, weight_grad = _chunked(hidden, weight, labels, z_loss, soft_cap, place, gradients=True)
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.dtype = weight.dtype
        ctx.mark_non_differentiable(*losses[1:])
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden_grad, weight_grad = ctx.saved_tensors
        scaled = torch.empty_like(weight_grad, dtype=ctx.dtype)
        return hidden_grad * grads[0], torch.mul(weight_grad, grads[0], out=scaled), *(None,) * 4


def _chunked(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    z_loss: float,
    soft_cap: float | None,
    place: SplitCrossEntropy,
    gradients: bool,
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None, Tensor | None]:
    """(total, nll, z); with `gradients` also those of the total with respect to `hidden` (a summand) and `weight`."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    count, share, device = hidden.shape[0], weight.shape[0], hidden.device
    nll = torch.empty(count, dtype=wide, device=device)
    z = torch.empty_like(nll)
    hidden_grad = torch.empty_like(hidden) if gradients else None
    weight_grad = torch.zeros_like(weight, dtype=wide) if gradients else None
    # Buffers are reused: fresh ones of this size cost a page fault per 4 KiB on a CPU.
    rows = max(1, min(chunk_rows(share, hidden.shape[1], hidden.element_size()), count))
    size = block_rows(rows, share, device.type)
    buffer = torch.empty(rows, share, dtype=hidden.dtype, device=device)
    scratch = torch.empty(size, share, dtype=wide, device=device)
    product = torch.empty_like(weight) if gradients and weight.dtype != wide else None
    for start in range(0, count, rows):
        here = slice(start, min(start + rows, count))
        x, label = hidden[here], labels[here]
        products = torch.mm(x, weight.T, out=buffer[: len(x)])
        index = label - place.first
        mine = (label != IGNORE) & (index >= 0) & (index < share)
        index = index.where(mine, 0).unsqueeze(1)
        blocks = [slice(at, min(at + size, len(x))) for at in range(0, len(x), size)]
        held = [_exponentiate(products[at], scratch, index[at], mine[at], soft_cap, alone=len(blocks) == 1) for at in blocks]
        stated = [torch.stack((block.top, block.sum, block.chosen)) for block in held]
        tops, sums, picked = all_gather(torch.cat(stated, dim=1)[None], place.ranks, 0).unbind(1)
        highest = tops.amax(0)
        partition = (sums * (tops - highest).exp()).sum(0)
        log_partition = highest + partition.log()
        valid = (label != IGNORE).to(wide)
        nll[here] = (log_partition - picked.sum(0)) * valid
        z[here] = log_partition.square() * valid
        if hidden_grad is None or weight_grad is None:
            continue
        factor = valid * (1 + 2 * z_loss * log_partition) / partition
        for at, block in zip(blocks, held, strict=True):
            if len(blocks) > 1:  # the next one was computed in the same memory
                block = _exponentiate(products[at], scratch, index[at], mine[at], soft_cap, alone=True)
            gradient = block.exponents.mul_((factor[at] * (block.top - highest[at]).exp()).unsqueeze(1))
            gradient.scatter_add_(1, index[at], -mine[at].to(wide).unsqueeze(1))
            products[at].copy_(gradient if block.slope is None else gradient.mul_(block.slope))
        torch.mm(products, weight, out=hidden_grad[here])
        _add(weight_grad, products, x, product)
    return ((nll + z_loss * z).sum(), nll, z), hidden_grad, weight_grad


class _Block(NamedTuple):
    """Some rows of this rank's logits c, each with its largest: exp(c - top), their sum, the logit of the label or 0, and the
    derivative of the cap."""

    exponents: Tensor
    top: Tensor
    sum: Tensor
    chosen: Tensor
    slope: Tensor | None


def _exponentiate(products: Tensor, scratch: Tensor, index: Tensor, mine: Tensor, soft_cap: float | None, alone: bool) -> _Block:
    """The block of `products`, worked out in `scratch`; only its numbers a row are kept where it is not `alone`."""
    logits, slope = scratch[: len(products)].copy_(products), None
    if soft_cap is not None:
        bounded = logits.div_(soft_cap).tanh_()
        slope = 1 - bounded.square() if alone else None
        logits.mul_(soft_cap)
    chosen = logits.gather(1, index).squeeze(1) * mine
    top = logits.amax(1)
    exponents = logits.sub_(top.unsqueeze(1)).exp_()
    return _Block(exponents, top, exponents.sum(1), chosen, slope)


def _add(total: Tensor, gradient: Tensor, x: Tensor, product: Tensor | None) -> None:
    """Adds gradient.T @ x to `total`, by way of `product` where that is wider than the factors."""
    if product is None:
        torch.addmm(total, gradient.T, x, out=total)
        return
    torch.mm(gradient.T, x, out=product)
    # A CPU adds tensors of two dtypes by way of a whole copy in the wider one; so a part at a time.
    size = block_rows(len(total), x.shape[1], x.device.type)
    for some, part in zip(total.split(size), product.split(size), strict=True):
        some += part
