"""Objectives: the loss that a step minimizes, computed inside the last part of a model."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from forge_core.batch import IGNORE
from forge_core.protocols.model import Head, LossTerms


@dataclass(frozen=True)
class CrossEntropy:
    """Sum over valid tokens of the negative log-likelihood, plus `z_loss` times the squared log partition function.

    With `label_smoothing` a, what is minimized is (1 - a) nll + a times the mean nll of all words as the label, plus the z term.
    Only the gradient is of that: the value of the sum, and what each row adds to it, stays with the labels alone, so that a loss,
    its perplexity and its curve can be compared with those of a run without smoothing. The modules of multi-token prediction are
    trained and reported in the same way.

    Metrics: `nll`, with a z-loss `z`, and with smoothing `smoothed`, what is minimized; each a sum over valid tokens.
    """

    z_loss: float = 0.0
    label_smoothing: float = 0.0

    def __call__(self, head: Head, hidden: torch.Tensor, labels: torch.Tensor) -> LossTerms:
        """`hidden` (B, T, embed) after the final norm, `labels` (B, T) int64, already shifted."""
        smoothed = {"smoothing": self.label_smoothing} if self.label_smoothing else {}
        total, nll, z = head.loss(hidden, labels, self.z_loss, **smoothed)
        metrics = {"nll": nll.sum(), "z": z.sum()} if self.z_loss else {"nll": nll.sum()}
        each = nll + self.z_loss * z if self.z_loss else nll
        if smoothed:
            metrics["smoothed"] = total.detach()
            total = _Valued.apply(total, each.sum())
        return LossTerms(total, (labels != IGNORE).sum(), metrics, each.sum(1))


class _Valued(torch.autograd.Function):
    """The second argument, with the gradient of the first."""

    @staticmethod
    def forward(_: Any, total: torch.Tensor, value: torch.Tensor) -> torch.Tensor:  # noqa: ARG004 (only its gradient counts)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(_: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grads[0], None
