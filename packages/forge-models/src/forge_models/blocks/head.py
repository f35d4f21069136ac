"""The last module of a decoder: logits for inference, the loss for training.

Projection to the vocabulary and cross-entropy are one operation, so that the logits of a whole batch never exist. Rows are
processed in chunks. The gradients of a chunk are computed together with its logits, so the backward only scales them: for row n
with logits c, log partition function L = logsumexp(c) and label y,

    loss = L - c[y] + z_loss * L^2,    d loss / d c = softmax(c) * (1 + 2 * z_loss * L) - onehot(y).

Label smoothing a (Szegedy et al., 2016) spreads the share a of the target evenly over all V words: L - (1 - a) c[y] - a mean(c)
replaces L - c[y], and (1 - a) onehot(y) + a / V replaces onehot(y). A weight per row multiplies the loss of the row and both
targets.

A chunk takes two passes over its logits. With m the largest logit of a row, the first computes m, sum(exp(c - m)) and c[y], and
for smoothing also sum(c) and the number of logits. These give a factor f, and the second pass replaces the logits by the
derivative of the loss, f * exp(c - m) - onehot(y), times the derivative of the soft cap.

If ranks split the vocabulary, each has some of the logits of every row. They exchange three numbers per row: their maximum m,
s = sum(exp(c - m)), and the logit of the label if they have it; for smoothing also the sum and the number of their logits. With M
the largest m, L = M + log(sum(s * exp(m - M))), and the rest is as in one process.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from forge_core.batch import IGNORE
from forge_core.errors import ForgeError
from forge_core.protocols.model import LossHead, LossTerms, Objective
from forge_core.specs import Init, ModuleSpec, TensorSpec
from forge_models.blocks.layers import unfilled
from forge_models.torch_private import graph_is_kept, onednn_product


class Chunk(NamedTuple):
    """Rows of logits and their labels.

    Attributes:
        products: (n, vocab) logits before the cap.
        labels: (n, 1) index of the label in this rank's vocabulary; 0 if another rank has it.
        mine: (n,) whether this rank's vocabulary has the label.
        soft_cap: see `LossHead`.
        spread: whether the target gives every word a probability.
    """

    products: Tensor
    labels: Tensor
    mine: Tensor
    soft_cap: float | None
    spread: bool = False


class Target(NamedTuple):
    """Target probabilities times the weight of the row, each (n,): extra probability of the label, and of every word (None: 0);
    both 0 for rows without a label."""

    label: Tensor
    word: Tensor | None


class Passes(Protocol):
    """Passes over one chunk: call `numbers`, then `differentiate` at most once."""

    def numbers(self) -> Tensor:
        """Returns (3, n): largest logit, sum of exponentials, and logit of the label (0 if another rank has it). If the target is
        spread, returns (5, n) with the sum of the logits and their number."""
        ...

    def differentiate(self, factor: Tensor, target: Target | None = None) -> None:
        """Replaces the logits by the derivative with `factor` (n,); without `target`, the target is the label alone."""
        ...


class InParts:
    """Passes without compilation, over few enough rows at a time that a CPU's cache holds them."""

    def __init__(self, chunk: Chunk, size: int, scratch: Tensor | None) -> None:
        """Processes `size` rows at a time, in `scratch` (size, vocab) or in place."""
        self._parts = list(zip(*(given.split(size) for given in chunk[:3]), strict=True))
        self._size, self._scratch, self._soft_cap, self._spread = size, scratch, chunk.soft_cap, chunk.spread
        self._held: list[_Block] = []

    def numbers(self) -> Tensor:
        self._held = [self._exponentiate(*part, keep=len(self._parts) == 1, spread=self._spread) for part in self._parts]
        return torch.cat([torch.stack((block.top, block.sum, block.chosen, *block.of_all)) for block in self._held], dim=1)

    def differentiate(self, factor: Tensor, target: Target | None = None) -> None:
        for at, (part, block, scale) in enumerate(zip(self._parts, self._held, factor.split(self._size), strict=True)):
            if len(self._parts) > 1:  # later parts have overwritten the scratch
                block = self._exponentiate(*part, keep=True)
            label = part[2].to(scale.dtype)
            if target is None:
                block.exponents.mul_(scale.unsqueeze(1)).scatter_add_(1, part[1], -label.unsqueeze(1))
            else:
                here = slice(at * self._size, at * self._size + len(scale))
                block.exponents.mul_(scale.unsqueeze(1))
                if target.word is not None:
                    block.exponents.sub_(target.word[here].unsqueeze(1))
                block.exponents.scatter_add_(1, part[1], -(label * target.label[here]).unsqueeze(1))
            if block.slope is not None:
                block.exponents.mul_(block.slope)
            if self._scratch is not None:
                part[0].copy_(block.exponents)

    def _exponentiate(self, products: Tensor, index: Tensor, mine: Tensor, keep: bool, spread: bool = False) -> "_Block":
        """Computes the block of `products` in the scratch or in place; without `keep`, only its per-row numbers are valid."""
        logits, slope = products if self._scratch is None else self._scratch[: len(products)].copy_(products), None
        if self._soft_cap is not None:
            bounded = logits.div_(self._soft_cap).tanh_()
            slope = 1 - bounded.square() if keep else None
            logits.mul_(self._soft_cap)
        chosen = logits.gather(1, index).squeeze(1) * mine
        top = logits.amax(dim=1)
        of_all = _of_all(logits) if spread else ()
        exponents = logits.sub_(top.unsqueeze(1)).exp_()
        return _Block(exponents, top, exponents.sum(dim=1), chosen, slope, of_all)


class _Block(NamedTuple):
    """Values of some rows of logits c with largest logit `top`: exp(c - top), their sum, the logit of the label (0 if another
    rank has it), the derivative of the cap, and, if the target is spread, the sum and number of the logits."""

    exponents: Tensor
    top: Tensor
    sum: Tensor
    chosen: Tensor
    slope: Tensor | None
    of_all: tuple[Tensor, ...]


class FusedPasses:
    """Compiled passes: the first reads the logits twice, the second once; neither allocates another tensor of their size."""

    def __init__(self, chunk: Chunk) -> None:
        """Processes all rows of `chunk` at once."""
        self._chunk, self._spread = chunk[:4], chunk.spread
        self._top: Tensor | None = None

    def numbers(self) -> Tensor:
        found = _compiled(_numbers_of_all if self._spread else _numbers)(*self._chunk)
        self._top = found[0]
        return found

    def differentiate(self, factor: Tensor, target: Target | None = None) -> None:
        if target is None:
            _compiled(_differentiate)(*self._chunk, self._top, factor)
        else:
            word = torch.zeros_like(target.label) if target.word is None else target.word
            _compiled(_differentiate_target)(*self._chunk, self._top, factor, target.label, word)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True, dynamic=True)


def _numbers(products: Tensor, index: Tensor, mine: Tensor, soft_cap: float | None) -> Tensor:
    logits, _ = _capped(products, soft_cap)
    top = logits.amax(1)
    chosen = logits.gather(1, index).squeeze(1) * mine
    return torch.stack((top, (logits - top.unsqueeze(1)).exp().sum(1), chosen))


def _differentiate(products: Tensor, index: Tensor, mine: Tensor, soft_cap: float | None, top: Tensor, factor: Tensor) -> None:
    logits, slope = _capped(products, soft_cap)
    label = (torch.arange(products.shape[1], device=products.device) == index) & mine.unsqueeze(1)
    derivative = (logits - top.unsqueeze(1)).exp() * factor.unsqueeze(1) - label.to(logits.dtype)
    products.copy_(derivative if slope is None else derivative * slope)


def _numbers_of_all(products: Tensor, index: Tensor, mine: Tensor, soft_cap: float | None) -> Tensor:
    return torch.cat((_numbers(products, index, mine, soft_cap), torch.stack(_of_all(_capped(products, soft_cap)[0]))))


def _differentiate_target(
    products: Tensor,
    index: Tensor,
    mine: Tensor,
    soft_cap: float | None,
    top: Tensor,
    factor: Tensor,
    on_label: Tensor,
    on_word: Tensor,
) -> None:
    logits, slope = _capped(products, soft_cap)
    label = (torch.arange(products.shape[1], device=products.device) == index) & mine.unsqueeze(1)
    target = on_word.unsqueeze(1) + label.to(logits.dtype) * on_label.unsqueeze(1)
    derivative = (logits - top.unsqueeze(1)).exp() * factor.unsqueeze(1) - target
    products.copy_(derivative if slope is None else derivative * slope)


def _of_all(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sum and number of the logits of each row; ranks that share the vocabulary may have different numbers."""
    total = logits.sum(dim=1)
    return total, torch.full_like(total, logits.shape[1])


def _capped(products: Tensor, soft_cap: float | None) -> tuple[Tensor, Tensor | None]:
    """Returns the capped logits in fp32 (fp64 if the input is fp64), and the derivative of the cap."""
    logits = products.to(torch.promote_types(products.dtype, torch.float32))
    if soft_cap is None:
        return logits, None
    bounded = (logits / soft_cap).tanh()
    return soft_cap * bounded, 1 - bounded.square()


TILE = 4096
"""Vocabulary entries per oneDNN product: oneDNN allocates its output, and at this size the heap serves the allocation."""

LEAST = 2**19
"""Minimum number of elements of a weight for which oneDNN is faster."""


def project(hidden: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """Writes hidden (rows, embed) @ weight.T (embed, vocab) to `out` and returns it.

    In fp32 on a CPU, oneDNN computes it tile by tile in two thirds of the time of MKL, torch's default (`benchmarks/LOG.md`).
    torch's FlopCounterMode counts 0 for these products; `forge_models.flops` counts from the model's shape.
    `torch.backends.mkldnn.enabled = False` disables them.
    """
    if weight.numel() < LEAST or not _replaces_mkl(hidden):
        return torch.mm(hidden, weight.T, out=out)
    for part, rows in zip(out.split(TILE, dim=1), weight.split(TILE), strict=True):
        part.copy_(onednn_product(hidden, rows))
    return out


def _replaces_mkl(hidden: Tensor) -> bool:
    fp32 = hidden.device.type == "cpu" and hidden.dtype == torch.float32
    onednn = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    return fp32 and onednn and torch.backends.mkl.is_available()


CHUNK_BYTES = 2**25
"""Maximum bytes of logits, in the dtype of the products, for which a chunk has at least 512 rows instead of 256."""

CPU_BLOCK = 2**20
"""Elements per block on a CPU: 4 MiB in fp32, which stay in its cache through all passes."""

ACCELERATOR_BLOCK = 2**26
"""Elements per block on an accelerator: 256 MiB in fp32, so that a pass takes far longer than its launch."""


def chunk_rows(vocab: int, dim: int, itemsize: int) -> int:
    """Returns the number of rows in a chunk of hidden states (rows, dim) whose logits have `vocab` elements of `itemsize` bytes.

    Each chunk reads the projection (vocab, dim) and adds to its gradient; more rows amortize this memory traffic. A chunk has
    `dim` rows, so that its logits are as large as the projection, but at least 256, or 512 if these fit into `CHUNK_BYTES`.
    """
    return max(512 if 512 * vocab * itemsize <= CHUNK_BYTES else 256, dim)


def block_rows(rows: int, width: int, device: str) -> int:
    """Returns how many of `rows`, each with `width` elements, to process at a time in fp32 on a device type."""
    return max(1, min(rows, (CPU_BLOCK if device == "cpu" else ACCELERATOR_BLOCK) // width))


class Head(nn.Module):
    """Projection to the vocabulary. Parallel strategies replace `core`.

    Training calls `forward` with an objective, which calls `loss`, so that hooks of this module's call, such as gathering a
    sharded weight, run in training as well as in inference.
    """

    def __init__(self, dim: int, vocab_size: int, std: float, soft_cap: float | None = None, multiplier: float = 1.0) -> None:
        super().__init__()
        self.multiplier = multiplier
        self.weight = unfilled(vocab_size, dim)
        self.core: LossHead = ChunkedCrossEntropy()
        self.std = std
        self.soft_cap = soft_cap

    def forward(self, hidden: Tensor, labels: Tensor | None = None, objective: Objective | None = None) -> Tensor | LossTerms:
        """(B, T, embed) -> logits (B, T, vocab) in the dtype of `hidden`, or with an objective its `LossTerms`."""
        if objective is not None and labels is not None:
            return objective(self, hidden, labels)
        logits = F.linear(self._scaled(hidden), self.weight)
        return logits if self.soft_cap is None else self.soft_cap * (logits / self.soft_cap).tanh()

    def loss(
        self, hidden: Tensor, labels: Tensor, z_loss: float = 0.0, smoothing: float = 0.0, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (total, nll, z) of the loss head for `hidden` (B, T, embed), `labels` (B, T) and `weights` (B, T) or None; nll
        and z are (B, T).

        Raises:
            ValueError: there is not one label per position.
        """
        if labels.shape != hidden.shape[:-1]:
            raise ValueError(
                f"labels {tuple(labels.shape)} do not fit hidden states {tuple(hidden.shape)}; give one label per position"
            )
        more: dict[str, Any] = {"smoothing": smoothing} if smoothing else {}
        if weights is not None:
            more["weights"] = weights.flatten()
        rows = self._scaled(hidden).flatten(0, -2)
        total, nll, z = self.core(rows, self.weight, labels.flatten(), z_loss, self.soft_cap, **more)
        return total, nll.view(labels.shape), z.view(labels.shape)

    def predicted(self, hidden: Tensor) -> Tensor:
        """(B, T, embed) -> (B, T) int64: the row of the projection with the largest logit.

        Raises:
            ForgeError: a plugin has replaced the loss head by one that has no `best`.
        """
        best = getattr(self.core, "best", None)
        if best is None:
            raise ForgeError(f"loss head {type(self.core).__name__} has no `best`, which classification needs; use another one")
        return best(self._scaled(hidden).flatten(0, -2), self.weight).view(hidden.shape[:-1])

    def _scaled(self, hidden: Tensor) -> Tensor:
        # the factor on logits is on their input, which is smaller
        return hidden if self.multiplier == 1 else hidden * self.multiplier

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
        sampled: whether blocks in the middle of a chunk are skipped, see `for_dry_run`.
    """

    rows: int | None = None
    first: int = 0
    gather: Gather | None = None
    fused: bool = False
    sampled: bool = False

    def split(self, first: int, gather: Gather) -> "ChunkedCrossEntropy":
        """Returns the loss head of a rank that holds rows of the projection from `first` on."""
        return replace(self, first=first, gather=gather)

    def compiled(self) -> "ChunkedCrossEntropy":
        """Returns a loss head with three compiled passes over the logits of a chunk instead of one per operator."""
        return replace(self, fused=True)

    def for_dry_run(self) -> "ChunkedCrossEntropy":
        """Returns a loss head that allocates, keeps and exchanges the same, but skips blocks in the middle of a chunk where each
        repeats the memory of the one before. Its values are undefined; a dry run has none."""
        return replace(self, sampled=True)

    def best(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Returns (N,) int64: the row of the whole projection with the largest logit, the same on all ranks.

        `hidden` and `weight` are as for a call; a soft cap would change nothing.
        """
        rows = self.rows or chunk_rows(len(weight), hidden.shape[1], hidden.element_size())
        found = [(part @ weight.T).max(1) for part in hidden.split(max(1, rows))]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        value = torch.cat([each.values for each in found]).to(wide)
        index = torch.cat([each.indices for each in found]) + self.first
        if self.gather is None:
            return index
        values, indices = self.gather(torch.stack((value, index.to(wide)))).unbind(1)  # ids of labels are exact in fp32
        return indices.gather(0, values.argmax(0, keepdim=True)).squeeze(0).long()

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        z_loss: float,
        soft_cap: float | None,
        smoothing: float = 0.0,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (total with graph, nll (N,), z (N,)) in fp32 (fp64 for fp64 inputs); 0 for rows without a label.

        Args:
            hidden: (N, embed).
            weight: (vocab, embed), or this rank's share of it.
            labels: (N,) int64 over the whole vocabulary; `IGNORE`: no loss.
            z_loss: weight of the squared log partition function.
            soft_cap: if given, logits become soft_cap * tanh(logits / soft_cap).
            smoothing: share of the target that is spread over all words. It affects the total, but not nll.
            weights: (N,) factor on the loss of each row; None: 1. They affect the total, but neither nll nor z.
        """
        terms = _Terms(z_loss, soft_cap, smoothing, None if weights is None else weights.detach())
        if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
            return _CrossEntropy.apply(hidden, weight, labels, terms, self)
        losses, _, _ = _chunked(hidden, weight, labels, terms, self, (False, False))
        return losses


@dataclass(frozen=True)
class _Terms:
    """Terms of the loss; see `ChunkedCrossEntropy.__call__`."""

    z_loss: float
    soft_cap: float | None
    smoothing: float
    weights: Tensor | None


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        terms: _Terms,
        head: ChunkedCrossEntropy,
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs = (ctx.needs_input_grad[0], ctx.needs_input_grad[1])
        (total, nll, z), hidden_grad, weight_grad = _chunked(hidden, weight, labels, terms, head, needs)
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.weight_dtype, ctx.sampled = weight.dtype, head.sampled
        ctx.mark_non_differentiable(nll, z)
        return total, nll, z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden_grad, weight_grad = ctx.saved_tensors
        scale = grads[0]
        return (
            None if hidden_grad is None else hidden_grad * scale,
            None if weight_grad is None else _scaled(weight_grad, scale, ctx.weight_dtype, ctx.sampled),
            *(None,) * 3,
        )


def _scaled(total: Tensor, scale: Tensor, dtype: torch.dtype, sampled: bool = False) -> Tensor:
    """Returns `total` * `scale` in `dtype`, computed in the dtype of `scale`; in place if this is the last backward of the graph.

    Allocates nothing else of that size, because the gradient of the projection is the largest tensor of a model.
    """
    last = not graph_is_kept()
    result = total if last and total.dtype == dtype else torch.empty_like(total, dtype=dtype)
    if total.dtype == scale.dtype == dtype:
        return torch.mul(total, scale, out=result)
    size = block_rows(len(total), total.shape[1], total.device.type)
    for at in _block_starts(len(total), size, sampled):
        result[at : at + size].copy_(total[at : at + size].to(scale.dtype) * scale)
    return result


def _chunked(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    terms: _Terms,
    head: ChunkedCrossEntropy,
    needs: tuple[bool, bool],
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None, Tensor | None]:
    """Returns (total, nll, z), and the gradients of the total with respect to `hidden` and `weight`, if `needs` requests them."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    count, vocab = hidden.shape[0], weight.shape[0]
    nll = torch.empty(count, dtype=wide, device=hidden.device)
    z = torch.empty_like(nll)
    uniform = torch.empty_like(nll) if terms.smoothing else None
    weights = None if terms.weights is None else terms.weights.to(wide)
    hidden_grad = torch.empty_like(hidden) if needs[0] else None
    weight_sum = _WeightGradient(weight, wide, head.sampled) if needs[1] else None
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
        for at in _block_starts(len(x), step, head.sampled):
            part = products[at : at + step]
            here = slice(start + at, start + at + len(part))
            mine = labels[here] != IGNORE
            index = labels[here] - head.first
            if head.gather is not None:
                mine = mine & (index >= 0) & (index < len(weight))
            index = index.where(mine, 0).unsqueeze(1)
            chunk = Chunk(part, index, mine, terms.soft_cap, spread=terms.smoothing > 0)
            passes = FusedPasses(chunk) if head.fused else InParts(chunk, size, scratch)
            found = _losses(passes, labels[here], None if weights is None else weights[here], head, terms, any(needs))
            nll[here], z[here] = found[:2]
            if uniform is not None:
                uniform[here] = found[2]
        if hidden_grad is not None:
            torch.mm(products, weight, out=hidden_grad[start : start + rows])
        if weight_sum is not None:
            weight_sum.add(products, x)
    target = nll if uniform is None else (1 - terms.smoothing) * nll + terms.smoothing * uniform
    each = target + terms.z_loss * z
    total = (each if weights is None else each * weights).sum()
    return (total, nll, z), hidden_grad, None if weight_sum is None else weight_sum.total


def _block_starts(count: int, size: int, sampled: bool) -> Sequence[int]:
    """Returns the first row of each block of `size` rows; if `sampled`, of the first three and of the last, which may be shorter.
    The variables of a block live until the next one replaces them, so the third block is the first whose memory repeats."""
    starts = range(0, count, size)
    return (*starts[:3], starts[-1]) if sampled and len(starts) > 4 else starts


def _losses(
    passes: Passes, labels: Tensor, weights: Tensor | None, head: ChunkedCrossEntropy, terms: _Terms, gradient: bool
) -> tuple[Tensor, ...]:
    """Returns nll and z of each row, and with smoothing the mean nll over all words. With `gradient`, the logits of `passes` are
    replaced by the derivative of the total. `weights` are those of these rows."""
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
    share = counted if weights is None else counted * weights
    target = None if weights is None else Target(share, None)
    if terms.smoothing:
        logit_sum, words = of_all
        losses += ((log_partition - logit_sum / words) * counted,)
        target = Target((1 - terms.smoothing) * share, terms.smoothing * share / words)
    if gradient:
        # softmax * (1 + 2 z_loss L) - onehot, in place of exp(logits - top)
        factor = share * (1 + 2 * terms.z_loss * log_partition) / partition
        passes.differentiate(factor if head.gather is None else factor * (top - highest).exp(), target)
    return losses


class _WeightGradient:
    """Sum over chunks of gradient.T @ x, kept in `wide` for products of every dtype; with one chunk it is the product. If
    `sampled`, only a few blocks of it are added, which takes the same memory."""

    def __init__(self, weight: Tensor, wide: torch.dtype, sampled: bool) -> None:
        self._wide, self._sampled = wide, sampled
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
        for at in _block_starts(len(self._total), size, self._sampled):
            self._total[at : at + size].add_(self._product[at : at + size])
