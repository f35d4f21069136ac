"""Distillation: a model learns the distribution of a frozen teacher over the next token (Hinton et al., 2015).

With c the logits of the student, z those of the teacher, t the temperature, p = softmax(z / t) and q = softmax(c / t), the loss
of a position with a label is

    (1 - weight) nll + weight t^2 KL(p || q),    d (t^2 KL) / d c = t (q - p).

With `top_k`, p has only the k most likely words of the teacher, renormalized. Their logits may come from a store
(`forge_models.teacher_logits`) instead of a teacher. Logits of student and teacher exist for a few rows
at a time; as in `blocks.head`, the gradients of these rows are computed together with their logits.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from forge_core.batch import IGNORE, Batch
from forge_core.errors import ForgeError
from forge_core.protocols.model import Head, LossTerms, Objective, TaughtObjective
from forge_models.blocks.head import chunk_rows
from forge_models.teacher_logits import StoredTeacherLogits

PROBE = "probe"
"""Name in `Batch.targets`: (B, T) int64 numbers from which checks make the logits of a teacher."""

STORED_WORDS, STORED_LOGITS = "teacher_words", "teacher_logits"
"""Names in `Batch.targets`: (B, T, top_k) words from a store, and their logits."""

TeacherLogits = Callable[[int, int], Tensor]
"""(first row, row after the last one) -> logits (n, vocab) of the teacher."""

TeacherShares = Callable[[int, int, torch.dtype], Tensor]
"""(first row, row after the last one, dtype) -> log-probabilities (n, vocab) of the teacher at its temperature."""


class DistillationLoss(TaughtObjective):
    """The loss of distillation. `with_teacher` adds the teacher, or `with_stored` its logits, without which there is no loss."""

    def __init__(
        self,
        teacher: str = "",
        weight: float = 0.5,
        temperature: float = 1.0,
        top_k: int | None = None,
        stored: str | None = None,
        module: nn.Module | None = None,
        logits: StoredTeacherLogits | None = None,
    ) -> None:
        """
        Args:
            teacher: path of the teacher, for messages.
            weight, temperature, top_k: see the module.
            stored: path of stored logits, for those who open them.
            module: the teacher: a decoder with its weights.
            logits: opened logits, which need a top_k; they replace the teacher.
        """
        self.teacher, self.weight, self.temperature, self.top_k = teacher, weight, temperature, top_k
        self.stored, self._module, self._logits = stored, module, logits

    def with_teacher(self, module: nn.Module) -> "DistillationLoss":
        """Returns the same loss with a teacher, which is frozen."""
        frozen = module.eval().requires_grad_(False)
        return DistillationLoss(self.teacher, self.weight, self.temperature, self.top_k, self.stored, frozen)

    def with_stored(self, logits: StoredTeacherLogits) -> "DistillationLoss":
        """Returns the same loss with stored logits of its teacher.

        Raises:
            ForgeError: the store has fewer words than `top_k`.
        """
        have = logits.facts.top_k
        if self.top_k is None or self.top_k > have:
            raise ForgeError(
                f"objective.top_k: {logits.folder} has the {have} most likely words, not {self.top_k or 'all'}; set it to at "
                f"most {have}, or run forge-train teach again with a larger top_k"
            )
        return DistillationLoss(self.teacher, self.weight, self.temperature, self.top_k, self.stored, logits=logits)

    def prepared(self, batch: Batch) -> Batch:
        """Adds the stored logits, if there are any, to a batch that lacks them.

        Raises:
            ForgeError: the store does not have a row.
        """
        if self._logits is None or self.top_k is None or STORED_WORDS in batch.targets:
            return batch
        words, logits = self._logits.of_batch(batch, self.top_k)
        return replace(batch, targets={**batch.targets, STORED_WORDS: words, STORED_LOGITS: logits})

    def __call__(self, head: Head, hidden: Tensor, labels: Tensor) -> LossTerms:
        """Refuses a call without a batch.

        Raises:
            ForgeError: always; call the result of `bound`.
        """
        raise ForgeError("distillation needs the tokens of a batch; call objective.bound(batch)(head, hidden, labels)")

    def bound(self, batch: Batch) -> Objective:
        """Returns the loss for one batch.

        Raises:
            ForgeError: there is no teacher.
        """
        if self._module is None and batch.targets.keys().isdisjoint((PROBE, STORED_WORDS)):
            raise ForgeError("distillation needs a teacher; give one with objective.with_teacher(module)")

        def terms(head: Head, hidden: Tensor, labels: Tensor) -> LossTerms:
            if STORED_WORDS in batch.targets:
                return self._terms(head, hidden, labels, _read(batch, len(head.weight), self.temperature))  # type: ignore[attr-defined]
            with torch.no_grad():
                taught = _probed(batch.targets[PROBE], head) if self._module is None else _answered(self._module, batch)

            def shares(first: int, after: int, dtype: torch.dtype) -> Tensor:
                return _kept(taught(first, after).to(dtype), self.top_k, self.temperature)

            return self._terms(head, hidden, labels, shares)

        return terms

    def _terms(self, head: Any, hidden: Tensor, labels: Tensor, shares: TeacherShares) -> LossTerms:
        """Returns the loss summed over labels. Metrics, each a sum over labels: `nll`, and `kl`, without the factor t^2."""
        settings = _Settings(self.temperature, head.soft_cap, shares)
        square = self.temperature**2
        total, each = _Divergence.apply(hidden.flatten(0, -2), head.weight, labels.flatten(), settings)
        each = each.view(labels.shape)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.weight < 1):
            likelihood, nll, _ = head.loss(hidden, labels)
        loss = self.weight * square * total
        if self.weight < 1:
            loss = loss + (1 - self.weight) * likelihood
        rows = (1 - self.weight) * nll.sum(1) + self.weight * square * each.sum(1)
        return LossTerms(loss, (labels != IGNORE).sum(), {"nll": nll.sum(), "kl": each.sum()}, rows)

    def with_targets(self, batch: Batch) -> Batch:
        """Returns a batch of random tokens with numbers that stand for a teacher."""
        return replace(batch, targets={PROBE: batch.tokens})


class _Captured(NamedTuple):
    """Hidden states of a teacher before its head, and the head."""

    hidden: Tensor
    head: Any


def _answered(module: nn.Module, batch: Batch) -> TeacherLogits:
    """Runs a teacher on a batch, and returns its logits, which are computed from hidden states when they are needed."""
    found = _captured(module, batch)
    hidden = found.hidden.flatten(0, -2)
    return lambda first, after: found.head(hidden[first:after])


def _captured(module: nn.Module, batch: Batch) -> _Captured:
    def capture(head: Any, hidden: Tensor, _: Tensor) -> Any:
        return _Captured(hidden, head)

    inputs = batch.inputs(module.specs().needs)  # type: ignore[operator]
    return module(batch.tokens, labels=batch.labels, objective=capture, **inputs)


@torch.no_grad()
def top_logits(module: nn.Module, batch: Batch, top_k: int) -> tuple[Tensor, Tensor]:
    """Returns a teacher's most likely words (labels, top_k) int64 at the labels of a batch, row by row, and their logits, in fp32
    (fp64 for fp64)."""
    found = _captured(module, batch)
    hidden = found.hidden.flatten(0, -2)
    labeled = (batch.labels != IGNORE).flatten()
    step = chunk_rows(len(found.head.weight), hidden.shape[1], hidden.element_size())
    words, values = [], []
    for first in range(0, len(hidden), step):
        logits = found.head(hidden[first : first + step])[labeled[first : first + step]]
        best = logits.to(torch.promote_types(logits.dtype, torch.float32)).topk(top_k, dim=1)
        words.append(best.indices)
        values.append(best.values)
    return torch.cat(words), torch.cat(values)


def _read(batch: Batch, vocab: int, temperature: float) -> TeacherShares:
    """Returns the distribution of stored logits of a prepared batch."""
    words, logits = (batch.targets[name].flatten(0, 1) for name in (STORED_WORDS, STORED_LOGITS))

    def shares(first: int, after: int, dtype: torch.dtype) -> Tensor:
        values = (logits[first:after].to(dtype) / temperature).log_softmax(1)
        return values.new_full((len(values), vocab), -torch.inf).scatter_(1, words[first:after].long(), values)

    return shares


def _probed(numbers: Tensor, head: Any) -> TeacherLogits:
    """Returns logits that checks use in place of a teacher's: a function of a number per row and of the word."""
    vocab = len(head.weight)

    def logits(first: int, after: int) -> Tensor:
        word = torch.arange(1, vocab + 1, device=numbers.device, dtype=head.weight.dtype)
        return 3 * torch.sin(0.7 * (numbers.flatten()[first:after, None] + 1).to(word.dtype) * word)

    return logits


class _Settings(NamedTuple):
    """Temperature, the soft cap of the student, and the distribution of the teacher."""

    temperature: float
    soft_cap: float | None
    shares: TeacherShares


class _Divergence(torch.autograd.Function):
    """KL(p || q) of rows of hidden states: the sum over rows with a label, and (N,) the value of each, 0 without a label."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, settings: _Settings) -> tuple[Tensor, Tensor]:
        temperature, soft_cap, shares = settings
        wide = torch.promote_types(hidden.dtype, torch.float32)
        each = torch.zeros(len(hidden), dtype=wide, device=hidden.device)
        hidden_grad = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        weight_grad = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        step = chunk_rows(len(weight), hidden.shape[1], hidden.element_size())
        for first in range(0, len(hidden), step):
            x, labeled = hidden[first : first + step], (labels[first : first + step] != IGNORE).to(wide).unsqueeze(1)
            logits, slope = (x @ weight.T).to(wide), None
            if soft_cap is not None:
                bounded = (logits / soft_cap).tanh()
                logits, slope = soft_cap * bounded, 1 - bounded.square()
            student = (logits / temperature).log_softmax(1)
            teacher = shares(first, first + len(x), wide)
            share = teacher.exp()
            each[first : first + step] = ((share * (teacher - student).where(share > 0, 0.0)) * labeled).sum(1)
            if hidden_grad is None and weight_grad is None:
                continue
            derivative = (student.exp() - share) * (labeled / temperature)
            derivative = (derivative if slope is None else derivative * slope).to(hidden.dtype)
            if hidden_grad is not None:
                torch.mm(derivative, weight, out=hidden_grad[first : first + step])
            if weight_grad is not None:
                weight_grad += (derivative.T @ x).to(wide)
        ctx.save_for_backward(hidden_grad, None if weight_grad is None else weight_grad.to(weight.dtype))
        ctx.mark_non_differentiable(each)
        return each.sum(), each

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *(None if saved is None else (saved * grads[0]).to(saved.dtype) for saved in ctx.saved_tensors), None, None


def _kept(logits: Tensor, top_k: int | None, temperature: float) -> Tensor:
    """Returns log-probabilities at a temperature; of all but the `top_k` largest logits of each row, minus infinity."""
    if top_k is None or top_k >= logits.shape[1]:
        return (logits / temperature).log_softmax(1)
    values, index = logits.topk(top_k, dim=1)
    return torch.full_like(logits, -torch.inf).scatter_(1, index, (values / temperature).log_softmax(1))
