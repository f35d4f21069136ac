"""The last module of a decoder: logits for inference, the loss for training.

Projection to the vocabulary and cross-entropy are one operation, so that the logits of a whole batch never exist. Rows are
processed in chunks. The gradients of a chunk are computed together with its logits, so the backward only scales them: for row n
with logits c, log partition function L = logsumexp(c) and label y,

    loss = L - c[y] + z_loss * L^2,    d loss / d c = softmax(c) * (1 + 2 * z_loss * L) - onehot(y).

Label smoothing a (Szegedy et al., 2016) spreads the share a of the target evenly over all V words: L - (1 - a) c[y] - a mean(c)
replaces L - c[y], and (1 - a) onehot(y) + a / V replaces onehot(y).

If ranks split the vocabulary, each has some of the logits of every row. They exchange three numbers per row: their maximum m,
s = sum(exp(c - m)), and the logit of the label if they have it; for smoothing also the sum and the number of their logits. With M
the largest m, L = M + log(sum(s * exp(m - M))), and the rest is as in one process.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from forge_core.batch import IGNORE
from forge_core.protocols.model import LossHead, LossTerms, Objective
from forge_core.specs import Init, ModuleSpec, TensorSpec
from forge_models.blocks.layers import unfilled
from forge_models.blocks.logit_passes import Chunk, FusedPasses, InParts, Passes, Target, block_rows, chunk_rows, project
from forge_models.torch_private import graph_is_kept


class Head(nn.Module):
    """Projection to the vocabulary. Parallel strategies replace `core`.

    Training calls `forward` with an objective, which calls `loss`, so that hooks of this module's call, such as gathering a
    sharded weight, run in training as well as in inference.
    """

    def __init__(self, dim: int, vocab_size: int, std: float, soft_cap: float | None = None) -> None:
        super().__init__()
        self.weight = unfilled(vocab_size, dim)
        self.core: LossHead = ChunkedCrossEntropy()
        self.std = std
        self.soft_cap = soft_cap

    def forward(self, hidden: Tensor, labels: Tensor | None = None, objective: Objective | None = None) -> Tensor | LossTerms:
        """(B, T, embed) -> logits (B, T, vocab) in the dtype of `hidden`, or with an objective its `LossTerms`."""
        if objective is not None and labels is not None:
            return objective(self, hidden, labels)
        logits = F.linear(hidden, self.weight)
        return logits if self.soft_cap is None else self.soft_cap * (logits / self.soft_cap).tanh()

    def loss(self, hidden: Tensor, labels: Tensor, z_loss: float = 0.0, smoothing: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (total, nll, z) of the loss head for `hidden` (B, T, embed) and `labels` (B, T); nll and z are (B, T).

        Raises:
            ValueError: there is not one label per position.
        """
        if labels.shape != hidden.shape[:-1]:
            raise ValueError(
                f"labels {tuple(labels.shape)} do not fit hidden states {tuple(hidden.shape)}; give one label per position"
            )
        smoothed = {"smoothing": smoothing} if smoothing else {}
        total, nll, z = self.core(hidden.flatten(0, -2), self.weight, labels.flatten(), z_loss, self.soft_cap, **smoothed)
        return total, nll.view(labels.shape), z.view(labels.shape)

    def tensor_specs(self) -> dict[str, TensorSpec]:
        """Returns the spec of the projection."""
        return {"weight": TensorSpec(("vocab", "embed"), Init("normal", self.std), "head")}

    def module_specs(self) -> dict[str, ModuleSpec]:
        """Returns the logical dimensions of input and output."""
        return {"": ModuleSpec((("batch", "sequence", "embed"),), (("batch", "sequence", "vocab"),))}


Gather = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ChunkedCrossEntropy:
    """A `forge_core.protocols.model.LossHead`.

    Attributes:
        rows: rows per chunk; None: chosen by the size of the vocabulary.
        first: index of the first row of the projection on this rank.
        gather: Collective: gathers (k, n) into (ranks, k, n); None if the projection is whole.
        fused: whether the operations on logits are compiled.
    """

    rows: int | None = None
    first: int = 0
    gather: Gather | None = None
    fused: bool = False

    def split(self, first: int, gather: Gather) -> "ChunkedCrossEntropy":
        """Returns the loss head of a rank that holds rows of the projection from `first` on."""
        return replace(self, first=first, gather=gather)

    def compiled(self) -> "ChunkedCrossEntropy":
        """Returns a loss head with three compiled passes over the logits of a chunk instead of one per operator."""
        return replace(self, fused=True)

    def __call__(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, z_loss: float, soft_cap: float | None, smoothing: float = 0.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (total with graph, nll (N,), z (N,)) in fp32 (fp64 for fp64 inputs); 0 for rows without a label.

        Args:
            hidden: (N, embed).
            weight: (vocab, embed), or this rank's share of it.
            labels: (N,) int64 over the whole vocabulary; `IGNORE`: no loss.
            z_loss: weight of the squared log partition function.
            soft_cap: if given, logits become soft_cap * tanh(logits / soft_cap).
            smoothing: share of the target that is spread over all words. It affects the total, but not nll.
        """
        if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
            return _CrossEntropy.apply(hidden, weight, labels, z_loss, soft_cap, smoothing, self)
        losses, _, _ = _chunked(hidden, weight, labels, z_loss, soft_cap, smoothing, self, (False, False))
        return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        z_loss: float,
        soft_cap: float | None,
        smoothing: float,
        head: ChunkedCrossEntropy,
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1])
        (total, nll, z), hidden_grad, weight_grad = _chunked(hidden, weight, labels, z_loss, soft_cap, smoothing, head, needs)
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
            *(None,) * 5,
        )


def _scaled(total: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `total` * `scale` in `dtype`, computed in the dtype of `scale`; in place if this is the last backward of the graph.

    Allocates nothing else of that size, because the gradient of the projection is the largest tensor of a model.
    """
    last = not graph_is_kept()
    result = total if last and total.dtype == dtype else torch.empty_like(total, dtype=dtype)
    if total.dtype == scale.dtype == dtype:
        return torch.mul(total, scale, out=result)
    size = block_rows(len(total), total.shape[1], total.device.type)
    for part, out in zip(total.split(size), result.split(size), strict=True):
        out.copy_(part.to(scale.dtype) * scale)
    return result


def _chunked(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    z_loss: float,
    soft_cap: float | None,
    smoothing: float,
    head: ChunkedCrossEntropy,
    needs: tuple[bool, bool],
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None, Tensor | None]:
    """Returns (total, nll, z), and the gradients of the total with respect to `hidden` and `weight`, if `needs` requests them."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    count, vocab = hidden.shape[0], weight.shape[0]
    nll = torch.empty(count, dtype=wide, device=hidden.device)
    z = torch.empty_like(nll)
    uniform = torch.empty_like(nll) if smoothing else None
    hidden_grad = torch.empty_like(hidden) if needs[0] else None
    weight_sum = _WeightGradient(weight, wide) if needs[1] else None
    # Buffers are reused: on a CPU, new ones of this size cost a page fault per 4 KiB.
    rows = max(1, min(head.rows or chunk_rows(vocab, hidden.shape[1], hidden.element_size()), count))
    buffer = torch.empty(rows, vocab, dtype=hidden.dtype, device=hidden.device)
    size = rows if head.fused else block_rows(rows, vocab, hidden.device.type)
    # A block is computed in place, unless its dtype is too narrow, or its logits are needed again after an exchange.
    again = head.gather is not None and size < rows
    apart = not head.fused and (again or hidden.dtype != wide)
    scratch = torch.empty(size, vocab, dtype=wide, device=hidden.device) if apart else None
    for start in range(0, count, rows):
        x = hidden[start : start + rows]
        products = project(x, weight, buffer[: x.shape[0]])
        step = size if head.gather is None else rows  # ranks exchange the numbers of a whole chunk
        for at in range(0, len(x), step):
            part = products[at : at + step]
            here = slice(start + at, start + at + len(part))
            mine = labels[here] != IGNORE
            index = labels[here] - head.first
            if head.gather is not None:
                mine = mine & (index >= 0) & (index < len(weight))
            index = index.where(mine, 0).unsqueeze(1)
            chunk = Chunk(part, index, mine, soft_cap, spread=smoothing > 0)
            passes = FusedPasses(chunk) if head.fused else InParts(chunk, size, scratch)
            found = _losses(passes, labels[here], head, z_loss, smoothing, any(needs))
            nll[here], z[here] = found[:2]
            if uniform is not None:
                uniform[here] = found[2]
        if hidden_grad is not None:
            torch.mm(products, weight, out=hidden_grad[start : start + rows])
        if weight_sum is not None:
            weight_sum.add(products, x)
    target = nll if uniform is None else (1 - smoothing) * nll + smoothing * uniform
    total = (target + z_loss * z).sum()
    return (total, nll, z), hidden_grad, None if weight_sum is None else weight_sum.total


def _losses(
    passes: Passes, labels: Tensor, head: ChunkedCrossEntropy, z_loss: float, smoothing: float, gradient: bool
) -> tuple[Tensor, ...]:
    """Returns nll and z of each row, and with smoothing the mean nll over all words. With `gradient`, the logits of `passes` are
    replaced by the derivative of the total."""
    numbers = passes.numbers()
    top, partition, chosen, *of_all = numbers.unbind(0)
    highest = top
    if head.gather is not None:
        tops, sums, picked, *each = head.gather(numbers).unbind(1)
        highest = tops.amax(0)
        partition, chosen = (sums * (tops - highest).exp()).sum(0), picked.sum(0)
        of_all = [numbers.sum(0) for numbers in each]
    log_partition, counted = highest + partition.log(), (labels != IGNORE).to(partition.dtype)
    losses = (log_partition - chosen) * counted, log_partition.square() * counted
    target = None
    if smoothing:
        logit_sum, words = of_all
        losses += ((log_partition - logit_sum / words) * counted,)
        target = Target((1 - smoothing) * counted, smoothing * counted / words)
    if gradient:
        # softmax * (1 + 2 z_loss L) - onehot, in place of exp(logits - top)
        factor = counted * (1 + 2 * z_loss * log_partition) / partition
        passes.differentiate(factor if head.gather is None else factor * (top - highest).exp(), target)
    return losses


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
