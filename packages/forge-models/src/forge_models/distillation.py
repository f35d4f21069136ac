"""Distillation: a model learns the distribution of a frozen teacher over the next token (Hinton et al., 2015).

With c the logits of the student, z those of the teacher, t the temperature, p = softmax(z / t) and q = softmax(c / t), the loss
of a position with a label is

    (1 - weight) nll + weight t^2 KL(p || q),    d (t^2 KL) / d c = t (q - p).

With `top_k`, p has only the k most likely words of the teacher, renormalized. Logits of student and teacher exist for a few rows
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

PROBE = "probe"
"""Name in `Batch.targets`: (B, T) int64 numbers from which checks make the logits of a teacher."""

TeacherLogits = Callable[[int, int], Tensor]
"""(first row, row after the last one) -> logits (n, vocab) of the teacher."""


class DistillationLoss(TaughtObjective):
    """The loss of distillation. `with_teacher` adds the teacher, without which there is no loss."""

    def __init__(
        self,
        teacher: str = "",
        weight: float = 0.5,
        temperature: float = 1.0,
        top_k: int | None = None,
        module: nn.Module | None = None,
    ) -> None:
        """
        Args:
            teacher: path of the teacher, for messages.
            weight, temperature, top_k: see the module.
            module: the teacher: a decoder with its weights.
        """
        self.teacher, self.weight, self.temperature, self.top_k, self._module = teacher, weight, temperature, top_k, module

    def with_teacher(self, module: nn.Module) -> "DistillationLoss":
        """Returns the same loss with a teacher, which is frozen."""
        return DistillationLoss(self.teacher, self.weight, self.temperature, self.top_k, module.eval().requires_grad_(False))

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
        if self._module is None and PROBE not in batch.targets:
            raise ForgeError("distillation needs a teacher; give one with objective.with_teacher(module)")

        def terms(head: Head, hidden: Tensor, labels: Tensor) -> LossTerms:
            with torch.no_grad():
                taught = _probed(batch.targets[PROBE], head) if self._module is None else _answered(self._module, batch)
            return self._terms(head, hidden, labels, taught)

        return terms

    def _terms(self, head: Any, hidden: Tensor, labels: Tensor, taught: TeacherLogits) -> LossTerms:
        """Returns the loss summed over labels. Metrics, each a sum over labels: `nll`, and `kl`, without the factor t^2."""
        settings = _Settings(self.temperature, self.top_k, head.soft_cap, taught)
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

    def capture(head: Any, hidden: Tensor, _: Tensor) -> Any:
        return _Captured(hidden, head)

    inputs = batch.inputs(module.specs().needs)  # type: ignore[operator]
    found: _Captured = module(batch.tokens, labels=batch.labels, objective=capture, **inputs)
    hidden = found.hidden.flatten(0, -2)
    return lambda first, after: found.head(hidden[first:after])


def _probed(numbers: Tensor, head: Any) -> TeacherLogits:
    """Returns logits that checks use in place of a teacher's: a function of a number per row and of the word."""
    vocab = len(head.weight)

    def logits(first: int, after: int) -> Tensor:
        word = torch.arange(1, vocab + 1, device=numbers.device, dtype=head.weight.dtype)
        return 3 * torch.sin(0.7 * (numbers.flatten()[first:after, None] + 1).to(word.dtype) * word)

    return logits


class _Settings(NamedTuple):
    """Temperature, top k, the soft cap of the student, and the logits of the teacher."""

    temperature: float
    top_k: int | None
    soft_cap: float | None
    taught: TeacherLogits


class _Divergence(torch.autograd.Function):
    """KL(p || q) of rows of hidden states: the sum over rows with a label, and (N,) the value of each, 0 without a label."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, settings: _Settings) -> tuple[Tensor, Tensor]:
        temperature, top_k, soft_cap, taught = settings
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
            teacher = _kept(taught(first, first + len(x)).to(wide) / temperature, top_k)
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


def _kept(logits: Tensor, top_k: int | None) -> Tensor:
    """Returns log-probabilities; of all but the `top_k` largest logits of each row, minus infinity."""
    if top_k is None or top_k >= logits.shape[1]:
        return logits.log_softmax(1)
    values, index = logits.topk(top_k, dim=1)
    return torch.full_like(logits, -torch.inf).scatter_(1, index, values.log_softmax(1))
