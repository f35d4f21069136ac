"""Projection to the vocabulary and cross-entropy in one, so that the logits of a whole batch never exist.

Rows are taken in chunks. While a chunk's logits exist its gradients are computed too, so the backward only scales them:
for row n with logits c, log partition function L = logsumexp(c) and label y,

    loss = L - c[y] + z_loss * L^2,    d loss / d c = softmax(c) * (1 + 2 * z_loss * L) - onehot(y).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from forge_core.batch import IGNORE
from forge_core.logits import block_rows, chunk_rows
from forge_models.blocks.projection import project
from forge_models.torch_private import graph_is_kept


@dataclass(frozen=True)
class ChunkedCrossEntropy:
    """The loss head of one process. `rows` of a chunk; chosen from the vocabulary when None."""

    rows: int | None = None

    def __call__(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float, soft_cap: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(total with graph, nll (N,), z (N,)) in fp32 (fp64 for fp64 inputs); 0 without a label.

        Args:
            hidden: (N, embed).
            weight: (vocab, embed).
            labels: (N,) int64; `IGNORE` = no loss.
            z_loss: weight of the squared log partition function.
            soft_cap: logits become soft_cap * tanh(logits / soft_cap) when given.
        """
        vocab, dim = weight.shape
        rows = self.rows or chunk_rows(vocab, dim, hidden.element_size())
        if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
            return _CrossEntropy.apply(hidden, weight, labels, z_loss, soft_cap, rows)
        losses, _, _ = _chunked(hidden, weight, labels, z_loss, soft_cap, rows, (False, False))
        return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float, soft_cap: float | None, rows: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1])
        (total, nll, z), hidden_grad, weight_grad = _chunked(hidden, weight, labels, z_loss, soft_cap, rows, needs)
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(nll, z)
        return total, nll, z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden_grad, weight_grad = ctx.saved_tensors
        scale = grads[0]
        return (
            None if hidden_grad is None else hidden_grad * scale,
            None if weight_grad is None else _scaled(weight_grad, scale, ctx.weight_dtype),
            *(None,) * 4,
        )


def _scaled(total: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`total` * `scale` in `dtype`, worked out in that of `scale`; in place of `total` where this backward is its graph's last.

    Nothing else of the whole size is made: the gradient of the projection is the largest of a model.
    """
    last = not graph_is_kept()
    found = total if last and total.dtype == dtype else torch.empty_like(total, dtype=dtype)
    if total.dtype == scale.dtype == dtype:
        return torch.mul(total, scale, out=found)
    size = block_rows(len(total), total.shape[1], total.device.type)
    for part, out in zip(total.split(size), found.split(size), strict=True):
        out.copy_(part.to(scale.dtype) * scale)
    return found


def _chunked(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    z_loss: float,
    soft_cap: float | None,
    rows: int,
    needs: tuple[bool, bool],
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None, Tensor | None]:
    """(total, nll, z), and the gradients of the total with respect to `hidden` and `weight` where `needs` says so."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    count, vocab = hidden.shape[0], weight.shape[0]
    nll = torch.empty(count, dtype=wide, device=hidden.device)
    z = torch.empty_like(nll)
    hidden_grad = torch.empty_like(hidden) if needs[0] else None
    weight_sum = _WeightGradient(weight, wide) if needs[1] else None
    # Buffers are reused: fresh ones of this size cost a page fault per 4 KiB on a CPU.
    rows = max(1, min(rows, count))
    buffer = torch.empty(rows, vocab, dtype=hidden.dtype, device=hidden.device)
    size = block_rows(rows, vocab, hidden.device.type)
    scratch = None if hidden.dtype == wide else torch.empty(size, vocab, dtype=wide, device=hidden.device)
    for start in range(0, count, rows):
        x = hidden[start : start + rows]
        products = project(x, weight, buffer[: x.shape[0]])
        for at in range(start, start + len(x), size):
            part = products[at - start : at - start + size]
            here = slice(at, at + len(part))
            logits = part if scratch is None else scratch[: part.shape[0]].copy_(part)
            nll[here], z[here] = _block(logits, labels[here], z_loss, soft_cap, any(needs))
            if scratch is not None and any(needs):
                part.copy_(logits)
        if hidden_grad is not None:
            torch.mm(products, weight, out=hidden_grad[start : start + rows])
        if weight_sum is not None:
            weight_sum.add(products, x)
    total = (nll + z_loss * z).sum()
    return (total, nll, z), hidden_grad, None if weight_sum is None else weight_sum.total


def _block(logits: Tensor, label: Tensor, z_loss: float, soft_cap: float | None, gradient: bool) -> tuple[Tensor, Tensor]:
    """nll and z of each row. With `gradient`, `logits` become the derivative of the total by them."""
    valid = (label != IGNORE).to(logits.dtype)
    index = label.where(label != IGNORE, 0).unsqueeze(1)
    slope = _cap(logits, soft_cap)
    chosen = logits.gather(1, index).squeeze(1)
    partition, log_partition = _exponentiate(logits)
    losses = (log_partition - chosen) * valid, log_partition.square() * valid
    if gradient:
        # softmax * (1 + 2 z_loss L) - onehot, in place of exp(logits - max)
        factor = valid * (1 + 2 * z_loss * log_partition) / partition
        logits.mul_(factor.unsqueeze(1)).scatter_add_(1, index, -valid.unsqueeze(1))
        if slope is not None:
            logits.mul_(slope)
    return losses


def _cap(logits: Tensor, soft_cap: float | None) -> Tensor | None:
    """Caps `logits` in place and returns the derivative of the cap, or None without one."""
    if soft_cap is None:
        return None
    bounded = logits.div_(soft_cap).tanh_()
    slope = 1 - bounded.square()
    logits.mul_(soft_cap)
    return slope


def _exponentiate(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Turns `logits` in place into exp(logits - max); returns their sum and log partition function, each (rows,)."""
    top = logits.amax(dim=1)
    partition = logits.sub_(top.unsqueeze(1)).exp_().sum(dim=1)
    return partition, top + partition.log()


class _WeightGradient:
    """Sum over chunks of gradient.T @ x, kept in `wide` for products of every dtype; with one chunk it is the product."""

    def __init__(self, weight: Tensor, wide: torch.dtype) -> None:
        self._wide = wide
        self._product = torch.empty_like(weight)
        self._total: Tensor | None = None

    @property
    def total(self) -> Tensor:
        """(vocab, embed)."""
        return self._product.zero_() if self._total is None else self._total

    def add(self, gradient: Tensor, x: Tensor) -> None:
        if self._total is None:
            self._total = torch.mm(gradient.T, x, out=self._product)
            return
        if x.dtype == self._wide:
            torch.addmm(self._total, gradient.T, x, out=self._total)
            return
        if self._total is self._product:
            self._total = self._product.to(self._wide)
        torch.mm(gradient.T, x, out=self._product)
        # A CPU adds tensors of two dtypes by way of a whole copy in the wider one; so a part at a time.
        size = block_rows(len(self._total), x.shape[1], x.device.type)
        for total, part in zip(self._total.split(size), self._product.split(size), strict=True):
            total += part
