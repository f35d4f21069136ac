"""Direct preference optimization (DPO): a model learns which of two answers is preferred, compared with a frozen reference.

Documents 2 p and 2 p + 1 of a row are the chosen and the rejected answer of pair p, each after its prompt. With r the
log-probability of an answer's trained tokens minus that of the reference, and d = r(chosen) - r(rejected), the loss of a pair is

    sigmoid (Rafailov et al., 2023)   -(1 - a) log s(beta d) - a log s(-beta d), a the label smoothing, 0 by default
    robust (Chowdhury et al., 2024)   (-(1 - a) log s(beta d) + a log s(-beta d)) / (1 - 2 a)
    ipo (Azar et al., 2024)           (r(chosen) / n(chosen) - r(rejected) / n(rejected) - 1 / (2 beta))^2, n the tokens

where s is the logistic function. `nll` times the mean nll per token of the chosen answer is added (Pang et al., 2024), so that
its probability does not fall together with that of the rejected one. The loss of a step is the mean over all its pairs. The loss
head runs twice: without gradients for the log-probabilities, and then with the weight of each token, the derivative of the loss
with respect to its nll. So full logits are never stored.
"""

from collections.abc import Iterator
from dataclasses import replace
from hashlib import blake2b
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from forge_core.batch import IGNORE, Batch
from forge_core.errors import DataError
from forge_core.protocols.model import Head, LossTerms, Objective, ReferencedObjective, Scorer
from forge_models.autograd import with_gradient_of

REFERENCE = "reference"
"""Name in `Batch.targets`: (B, D) log-probabilities of the documents of each row under the reference, 0 where there is none; D is
even."""

Variant = Literal["sigmoid", "robust", "ipo"]
Key = tuple[int, int]
"""Digest of a pair: 16 bytes as two integers."""


class PreferencePair(NamedTuple):
    """A preference pair in a batch. `key`: digest of its tokens and of which of them are trained, wherever it lies."""

    row: int
    number: int
    key: Key


def pairs_of(batch: Batch) -> Iterator[PreferencePair]:
    """Yields the pairs of a batch on the host, row by row.

    Raises:
        DataError: the rows have no documents, or an odd number of them.
    """
    if batch.documents is None:
        raise DataError(
            "preference pairs are two documents of a row, but the batch has no documents; set data.documents = 'mask'"
        )
    tokens, labels, documents = (part.numpy() for part in (batch.tokens, batch.labels, batch.documents))
    for row in range(len(tokens)):
        count = int(documents[row].max()) + 1
        if count % 2:
            raise DataError(f"a row has {count} documents, which are no preference pairs; use a source of format = 'preference'")
        borders = np.searchsorted(np.where(documents[row] < 0, count, documents[row]), np.arange(count + 1)).tolist()
        for number in range(count // 2):
            start, middle, stop = borders[2 * number : 2 * number + 3]
            digest = blake2b((middle - start).to_bytes(8, "little"), digest_size=16)
            digest.update(np.ascontiguousarray(tokens[row, start:stop]).tobytes())
            digest.update(np.ascontiguousarray(labels[row, start:stop]).tobytes())
            one, two = np.frombuffer(digest.digest(), dtype="<i8").tolist()
            yield PreferencePair(row, number, (one, two))


class ReferenceTable:
    """Log-probabilities of the two answers of pairs under a reference, by the key of the pair.

    `entries` has 32 bytes for each pair: the key as two int64, and two fp64, little-endian. A pair may occur several times.
    """

    def __init__(self, entries: bytes) -> None:
        numbers = np.frombuffer(entries, dtype="<i8").reshape(-1, 4)
        self._numbers = numbers[np.lexsort((numbers[:, 1], numbers[:, 0]))]

    @staticmethod
    def entry(key: Key, chosen: float, rejected: float) -> bytes:
        """Returns the entry of one pair."""
        return np.array(key, dtype="<i8").tobytes() + np.array((chosen, rejected), dtype="<f8").tobytes()

    def find(self, key: Key) -> np.ndarray | None:
        """Returns (2,) fp64, or None for an unknown pair."""
        first = self._numbers[:, 0]
        for place in range(int(np.searchsorted(first, key[0])), int(np.searchsorted(first, key[0], side="right"))):
            if int(self._numbers[place, 1]) == key[1]:
                return np.ascontiguousarray(self._numbers[place, 2:]).view("<f8")
        return None


class PreferenceLoss(ReferencedObjective):
    """The loss of DPO. `with_reference` adds the log-probabilities of the reference, without which batches cannot be prepared."""

    def __init__(
        self,
        beta: float = 0.1,
        loss: Variant = "sigmoid",
        label_smoothing: float = 0.0,
        nll: float = 0.0,
        table: ReferenceTable | None = None,
    ) -> None:
        """
        Args:
            beta: see the module.
            loss: see the module.
            label_smoothing: the share of pairs whose order is assumed to be wrong.
            nll: see the module.
            table: log-probabilities under the reference.
        """
        self.loss: Variant = loss
        self.beta, self.label_smoothing, self.nll, self._table = beta, label_smoothing, nll, table

    def with_reference(self, entries: bytes) -> "PreferenceLoss":
        """Returns the same loss with the log-probabilities of a reference, the entries of a `ReferenceTable`."""
        return PreferenceLoss(self.beta, self.loss, self.label_smoothing, self.nll, ReferenceTable(entries))

    def scorer(self) -> "AnswerScores":
        """Returns the objective that computes the log-probabilities of a reference."""
        return AnswerScores()

    def __call__(self, head: Head, hidden: Tensor, labels: Tensor) -> LossTerms:
        """Refuses a call without a batch.

        Raises:
            DataError: always; call the result of `bound`.
        """
        raise DataError("DPO needs the documents of a batch; call objective.bound(batch)(head, hidden, labels)")

    def prepared(self, batch: Batch) -> Batch:
        """Adds the reference to a batch that lacks it.

        Raises:
            DataError: the reference does not have a pair.
        """
        if REFERENCE in batch.targets:
            return batch
        if self._table is None:
            raise DataError("DPO needs log-probabilities of a reference; give them with objective.with_reference(entries)")
        found = list(pairs_of(batch))
        width = 2 * max((pair.number + 1 for pair in found), default=1)
        values = torch.zeros(len(batch.tokens), width, dtype=torch.float64)
        for row, number, key in found:
            if (scores := self._table.find(key)) is None:
                raise DataError(
                    f"a preference pair of sample {batch.samples[row] if batch.samples else row} has no log-probability under "
                    "the reference; its data have changed since the reference was computed"
                )
            values[row, 2 * number : 2 * number + 2] = torch.from_numpy(scores)
        return replace(batch, targets={**batch.targets, REFERENCE: values})

    def counts(self, batch: Batch) -> Tensor:
        """Returns (B,) int64: the number of pairs of each row in which both answers have labels."""
        reference, documents = _of(batch)
        return _valid(_lengths(batch.labels, documents, reference.shape[1])).sum(1)

    def bound(self, batch: Batch) -> Objective:
        """Returns the loss for the pairs of a prepared batch."""
        reference, documents = _of(batch)

        def terms(head: Head, hidden: Tensor, labels: Tensor) -> LossTerms:
            return self._terms(head, hidden, labels, documents, reference)

        return terms

    def _terms(self, head: Head, hidden: Tensor, labels: Tensor, documents: Tensor, reference: Tensor) -> LossTerms:
        """Returns the loss summed over pairs. Metrics, each a sum over pairs: `accuracy` (1 where the chosen answer has gained
        more), `margin` (beta d), `chosen` and `rejected` (beta r)."""
        width = reference.shape[1]
        with torch.no_grad():
            nll = head.loss(hidden.detach(), labels)[1]
            lengths = _lengths(labels, documents, width)
            valid = _valid(lengths)
            scores = -_by_document(nll, documents, width)
        with torch.enable_grad():
            scores = scores.unflatten(1, (-1, 2)).requires_grad_()  # (B, pairs, 2)
            gained = scores - reference.to(nll.dtype).unflatten(1, (-1, 2))
            counts = lengths.unflatten(1, (-1, 2)).clamp(min=1)
            losses = self._losses(gained, counts)
            if self.nll:
                losses = losses - self.nll * scores[..., 0] / counts[..., 0]
            losses = losses.where(valid, 0.0)
            (slopes,) = torch.autograd.grad(losses.sum(), scores)
        losses, gained = losses.detach(), gained.detach()
        value = losses.sum()
        if torch.is_grad_enabled():
            each = F.pad(-slopes.flatten(1), (0, 1))  # the last column is that of padding
            weights = each.gather(1, documents.long().where(documents >= 0, width))
            value = with_gradient_of(value, head.loss(hidden, labels, weights=weights)[0])
        chosen, rejected = (self.beta * gained).unbind(-1)
        margin = chosen - rejected
        metrics = {"accuracy": (margin > 0).to(margin.dtype), "margin": margin, "chosen": chosen, "rejected": rejected}
        sums = {name: each.where(valid, 0.0).sum() for name, each in metrics.items()}
        return LossTerms(value, valid.sum(), sums, losses.sum(1))

    def _losses(self, gained: Tensor, lengths: Tensor) -> Tensor:
        """Returns the loss of each pair (B, pairs) from the ratios and the numbers of tokens (B, pairs, 2)."""
        if self.loss == "ipo":
            chosen, rejected = (gained / lengths).unbind(-1)
            return (chosen - rejected - 1 / (2 * self.beta)).square()
        chosen, rejected = gained.unbind(-1)
        score, share = self.beta * (chosen - rejected), self.label_smoothing
        if self.loss == "robust":
            return (share * F.logsigmoid(-score) - (1 - share) * F.logsigmoid(score)) / (1 - 2 * share)
        return -(1 - share) * F.logsigmoid(score) - share * F.logsigmoid(-score)

    def with_targets(self, batch: Batch) -> Batch:
        """Returns a batch of random tokens with a reference: 2 nats for each label."""
        assert batch.documents is not None, "checks use batches with documents"
        width = batch.tokens.shape[1] + batch.tokens.shape[1] % 2
        return replace(batch, targets={REFERENCE: -2.0 * _lengths(batch.labels, batch.documents, width).double()})


class AnswerScores(Scorer):
    """Computes log-probabilities of documents. It is run on a reference, and is not trained."""

    name = "documents"
    """Name in `LossTerms.metrics` of the log-probabilities (B, D), D the smallest even number that is enough for all rows."""

    def entries(self, batch: Batch, terms: LossTerms) -> bytes:
        """Returns the entries of the pairs of a batch for a `ReferenceTable`."""
        scores = terms.metrics[self.name].double().cpu().numpy()
        return b"".join(
            ReferenceTable.entry(key, *scores[row, 2 * number : 2 * number + 2].tolist()) for row, number, key in pairs_of(batch)
        )

    def __call__(self, head: Head, hidden: Tensor, labels: Tensor) -> LossTerms:
        """Refuses a call without a batch; see `PreferenceLoss.__call__`."""
        raise DataError("log-probabilities of documents need a batch; call objective.bound(batch)(head, hidden, labels)")

    def bound(self, batch: Batch) -> Objective:
        """Returns the objective for one batch."""
        documents = batch.documents
        assert documents is not None, "`pairs_of` has looked"
        width = max(2, 2 * -(-(int(documents.max()) + 1) // 2))

        def terms(head: Head, hidden: Tensor, labels: Tensor) -> LossTerms:
            nll = head.loss(hidden, labels)[1]
            return LossTerms(nll.sum(), (labels != IGNORE).sum(), {self.name: -_by_document(nll, documents, width)})

        return terms


def _of(batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns the reference and the documents of a prepared batch."""
    if batch.documents is None or REFERENCE not in batch.targets:
        raise DataError("DPO needs documents and a reference in the batch; prepare it with objective.prepared(batch)")
    return batch.targets[REFERENCE], batch.documents


def _by_document(values: Tensor, documents: Tensor, width: int) -> Tensor:
    """Returns (B, width): sums of values (B, T) over each document of a row; those of padding are left out."""
    index = documents.long().where(documents >= 0, width)
    return values.new_zeros(len(values), width + 1).scatter_add(1, index, values)[:, :width]


def _lengths(labels: Tensor, documents: Tensor, width: int) -> Tensor:
    """Returns (B, width) int64: the number of labels of each document."""
    return _by_document((labels != IGNORE).long(), documents, width)


def _valid(lengths: Tensor) -> Tensor:
    """Returns (B, pairs) bool: whether both answers of a pair have labels."""
    return (lengths.unflatten(1, (-1, 2)) > 0).all(-1)
