"""Objectives: the loss that a step minimizes, computed inside the last part of a model."""

from dataclasses import dataclass

import torch

from forge_core.batch import IGNORE
from forge_core.protocols.model import Head, LossTerms


@dataclass(frozen=True)
class CrossEntropy:
    """Sum over valid tokens of the negative log-likelihood, plus `z_loss` times the squared log partition function.

    Metrics: `nll` and, with a z-loss, `z`; each a sum over valid tokens.
    """

    z_loss: float = 0.0

    def __call__(self, head: Head, hidden: torch.Tensor, labels: torch.Tensor) -> LossTerms:
        """`hidden` (B, T, embed) after the final norm, `labels` (B, T) int64, already shifted."""
        total, nll, z = head.loss(hidden, labels, self.z_loss)
        metrics = {"nll": nll.sum(), "z": z.sum()} if self.z_loss else {"nll": nll.sum()}
        rows = (nll + self.z_loss * z if self.z_loss else nll).sum(1)
        return LossTerms(total, (labels != IGNORE).sum(), metrics, rows)
