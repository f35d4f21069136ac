"""Sequence classification: cross-entropy over labels, at the last token of each document.

A classifier is a decoder whose head maps to labels instead of words (`[model] labels`). The batches of a source of labeled texts
have one label for each document, at its last token. With w the weight of a label, 1 by default, the loss of a step is the sum of
w nll over all documents, divided by their number.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from forge_core.batch import IGNORE, PADDING, Batch
from forge_core.errors import ForgeError
from forge_core.protocols.model import BatchObjective, Head, LossTerms
from forge_core.protocols.weights import Weights
from forge_models.hf.labels import unnamed

HEAD = "head.weight"
"""Name of a classifier's head. That of a language model has the same name, and is not taken."""


def has_head(labels: Sequence[str], weights: Weights) -> bool:
    """Whether weights have the head of a classifier of these labels; without one, its head is new.

    Raises:
        ForgeError: they have that of a classifier of other labels.
    """
    theirs = tuple(getattr(weights.model, "labels", ()))
    if not theirs or theirs == tuple(labels) or theirs == unnamed(len(labels)):
        return bool(theirs)
    raise ForgeError(
        f"{weights.facts.origin} is a classifier of {len(theirs)} labels, {', '.join(theirs)}, but model.labels has "
        f"{len(labels)}: {', '.join(labels)}. Set model.labels to the same names in the same order; or begin with a new head: "
        f"set start.weights to {weights.facts.origin} and start.exclude = ['{HEAD}']"
    )


class ClassificationLoss(BatchObjective):
    """The loss of a classifier. Its head must have `predicted`, as `forge_models.blocks.Head`."""

    def __init__(self, class_weights: Sequence[float] = ()) -> None:
        """
        Args:
            class_weights: weight of each label, in the order of the labels; empty: all are 1.
        """
        self.class_weights = tuple(class_weights)

    def __call__(self, head: Head, hidden: Tensor, labels: Tensor) -> LossTerms:
        """Returns the weighted loss summed over documents. Metrics, each a sum over documents: `accuracy`, 1 if the label has the
        largest logit, and with weights `nll`, the loss without them.

        Args:
            head: head of the model.
            hidden: (B, T, embed) hidden states after the final norm.
            labels: (B, T) int64 label at the last token of each document, elsewhere `IGNORE`.
        """
        labeled = labels != IGNORE
        classifier: Any = head
        with torch.no_grad():
            right = (classifier.predicted(hidden.detach()) == labels) & labeled
        weights = None
        if self.class_weights:
            wide = torch.promote_types(hidden.dtype, torch.float32)
            table = torch.tensor(self.class_weights, dtype=wide).to(labels.device, non_blocking=True)
            weights = table[labels.clamp(min=0)]
        total, nll, _ = head.loss(hidden, labels, weights=weights)
        each = nll if weights is None else nll * weights
        metrics = {"accuracy": right.sum().to(nll.dtype)}
        if weights is not None:
            metrics["nll"] = nll.sum()
        return LossTerms(total, labeled.sum(), metrics, each.sum(1))

    def with_targets(self, batch: Batch) -> Batch:
        """Returns a batch of random tokens with a label, 0 or 1, at the last token of each document, and no other."""
        last = torch.ones_like(batch.labels, dtype=torch.bool)
        if batch.documents is not None:
            last[:, :-1] = batch.documents[:, 1:] != batch.documents[:, :-1]
            last &= batch.documents != PADDING
        else:
            last[:, :-1] = False
        return replace(batch, labels=(batch.tokens % 2).where(last, IGNORE))
