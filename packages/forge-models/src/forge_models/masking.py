"""Objectives of masked tokens: masked language modeling (Devlin et al., 2019) and masked diffusion (Nie et al., 2025).

A model that sees both sides fills in hidden tokens. A token may be hidden if it is the label of the position before it, so the
same tokens are trained as by next-token prediction: prompts stay visible, and so does the first token of each document. A hidden
token is its own label: after `prepared`, logits at t are scored against the original token at t.

What is hidden is drawn by a counter-based generator (Philox, Salmon et al., 2011) from the seed, the sample number of the row and
the position, so layouts, micro-batches, resumes and padding do not change it. A row without a sample number has its tokens' hash
instead.
"""

from dataclasses import replace
from hashlib import blake2b
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from forge_core.batch import IGNORE, Batch
from forge_core.errors import DataError
from forge_core.protocols.model import BatchObjective, Head, LossTerms, Objective

WEIGHTS = "masked_weights"
"""Name in `Batch.targets`: (B, T) fp64 factor on the nll of each position."""
COUNTS = "masked_counts"
"""Name in `Batch.targets`: (B,) int64 number of tokens of each row that may be hidden."""
DRAWS = 4
"""Random numbers of a position: whether it is chosen, what replaces it, which random token, and the t of a document that begins
there."""


def draws(batch: Batch, seed: int) -> np.ndarray:
    """Returns (B, T, DRAWS) fp64 uniform in [0, 1), a function of the seed, the row's sample number and the position."""
    rows, length = batch.tokens.shape
    found = np.empty((rows, length, DRAWS))
    for row in range(rows):
        known = len(batch.samples) == rows and batch.samples[row] >= 0
        identity = batch.samples[row] if known else np.ascontiguousarray(batch.tokens[row].numpy()).tobytes()
        text = f"{seed}/{identity}".encode() if isinstance(identity, int) else f"{seed}:".encode() + identity
        key = np.frombuffer(blake2b(text, digest_size=16).digest(), dtype="<u8").astype(np.uint64)
        raw = np.random.Philox(key=key).random_raw(length * DRAWS)
        found[row] = (raw >> np.uint64(11)).reshape(length, DRAWS) * 2.0**-53
    return found


def may_be_hidden(batch: Batch) -> np.ndarray:
    """Returns (B, T) bool: whether each token is the label of the position before it."""
    found = np.zeros(tuple(batch.tokens.shape), dtype=np.bool_)
    found[:, 1:] = (batch.labels != IGNORE).numpy()[:, :-1]
    return found


def _hidden(batch: Batch, chosen: np.ndarray, replaced: np.ndarray) -> Batch:
    """Returns the batch with `replaced` as tokens, and as labels the original tokens where `chosen`."""
    labels = batch.tokens.where(torch.from_numpy(chosen), IGNORE)
    return replace(batch, tokens=torch.from_numpy(replaced), labels=labels)


class MaskedLMLoss(BatchObjective):
    """The mean negative log-likelihood of chosen tokens, most of which are hidden."""

    def __init__(
        self,
        mask_id: int,
        vocab_size: int,
        ratio: float = 0.15,
        random: float = 0.1,
        kept: float = 0.1,
        seed: int = 0,
    ) -> None:
        """
        Args:
            mask_id: id that replaces a chosen token.
            vocab_size: number of ids from which random tokens are drawn.
            ratio: probability of a token to be chosen.
            random: share of chosen tokens that are replaced by a random id below `vocab_size` instead.
            kept: share of chosen tokens that stay.
            seed: seed of all choices.
        """
        self.mask_id, self.vocab_size, self.seed = mask_id, vocab_size, seed
        self.ratio, self.random, self.kept = ratio, random, kept

    def prepared(self, batch: Batch) -> Batch:
        """Returns the batch with hidden tokens, and as labels the original tokens at the chosen positions."""
        drawn = draws(batch, self.seed)
        chosen = may_be_hidden(batch) & (drawn[..., 0] < self.ratio)
        tokens, what = batch.tokens.numpy(), drawn[..., 1]
        new = np.where(what < self.kept + self.random, (drawn[..., 2] * self.vocab_size).astype(np.int64), self.mask_id)
        new = np.where(what < self.kept, tokens, new)
        return _hidden(batch, chosen, np.where(chosen, new, tokens))

    def __call__(self, head: Head, hidden: Tensor, labels: Tensor) -> LossTerms:
        """Returns the loss summed over chosen tokens. Metric: `nll`, the same sum."""
        total, nll, _ = head.loss(hidden, labels)
        return LossTerms(total, (labels != IGNORE).sum(), {"nll": nll.sum()}, nll.sum(1))


class MaskedDiffusionLoss(BatchObjective):
    """The sum over hidden tokens of nll / t, divided by the number of tokens that may be hidden."""

    def __init__(self, mask_id: int, per: Literal["document", "row"] = "document", smallest: float = 1e-3, seed: int = 0) -> None:
        """
        Args:
            mask_id: id that replaces a hidden token.
            per: what has a t of its own.
            smallest: minimum t; t is uniform in [smallest, 1].
            seed: seed of all choices.
        """
        self.mask_id, self.smallest, self.seed = mask_id, smallest, seed
        self.per: Literal["document", "row"] = per

    def prepared(self, batch: Batch) -> Batch:
        """Returns the batch with hidden tokens, the original tokens as their labels, and 1 / t as their weights."""
        if WEIGHTS in batch.targets:
            return batch
        drawn, allowed = draws(batch, self.seed), may_be_hidden(batch)
        first = np.zeros(allowed.shape, dtype=np.int64)
        if self.per == "document" and batch.documents is not None:
            documents = batch.documents.numpy()
            begins = documents[:, 1:] != documents[:, :-1]
            first[:, 1:] = np.maximum.accumulate(np.where(begins, np.arange(1, documents.shape[1]), 0), axis=1)
        ratio = self.smallest + (1 - self.smallest) * np.take_along_axis(drawn[..., 3], first, axis=1)
        chosen = allowed & (drawn[..., 0] < ratio)
        targets = {
            WEIGHTS: torch.from_numpy(np.where(chosen, 1 / ratio, 0.0)),
            COUNTS: torch.from_numpy(allowed.sum(1, dtype=np.int64)),
        }
        tokens = np.where(chosen, self.mask_id, batch.tokens.numpy())
        return replace(_hidden(batch, chosen, tokens), targets={**batch.targets, **targets})

    def counts(self, batch: Batch) -> Tensor:
        """Returns (B,) int64: the number of tokens of each row that may be hidden."""
        return _targets(batch)[1]

    def bound(self, batch: Batch) -> Objective:
        """Returns the loss of a prepared batch."""
        weights, counts = _targets(batch)

        def terms(head: Head, hidden: Tensor, labels: Tensor) -> LossTerms:
            total, nll, _ = head.loss(hidden, labels, weights=weights.to(torch.promote_types(hidden.dtype, torch.float32)))
            masked = (labels != IGNORE).sum().to(nll.dtype)
            return LossTerms(total, counts.sum(), {"masked": masked}, (nll * weights.to(nll.dtype)).sum(1))

        return terms

    def __call__(self, head: Head, hidden: Tensor, labels: Tensor) -> LossTerms:
        """Refuses a call without a batch.

        Raises:
            DataError: always; call the result of `bound`.
        """
        raise DataError("masked diffusion needs the weights of a batch; call objective.bound(batch)(head, hidden, labels)")

    def with_targets(self, batch: Batch) -> Batch:
        """Returns a batch of random tokens with weights that depend on the tokens."""
        counts = (batch.labels != IGNORE).sum(1)
        return replace(batch, targets={WEIGHTS: 1.0 + (batch.tokens % 3).double(), COUNTS: counts})


def _targets(batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns the weights and counts of a prepared batch."""
    if WEIGHTS not in batch.targets:
        raise DataError("masked diffusion needs weights in the batch; prepare it with objective.prepared(batch)")
    return batch.targets[WEIGHTS], batch.targets[COUNTS]
