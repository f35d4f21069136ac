"""Unigram entropy: the loss of a model that knows only how often each token occurs."""

from collections.abc import Sequence

import numpy as np

from forge_core.protocols.data import Source

_BLOCK = 1 << 22


def token_counts(source: Source) -> np.ndarray:
    """(ids,) int64 occurrences of every token id: as a store recorded them, else by reading the source once."""
    recorded = getattr(source, "counts", None)
    if callable(recorded):
        return np.asarray(recorded())
    counts = np.zeros(0, dtype=np.int64)
    for start in range(0, source.tokens, _BLOCK):
        found = np.bincount(source.read(start, min(start + _BLOCK, source.tokens)).astype(np.int64), minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    return counts


def unigram_entropy(counts: Sequence[np.ndarray], weights: Sequence[float] = (1.0,)) -> float:
    """-sum p ln p in nats per token, p being the mixture by `weights` of the frequencies in `counts`."""
    mixed = np.zeros(max(len(own) for own in counts))
    for own, weight in zip(counts, weights, strict=True):
        mixed[: len(own)] += weight * own / own.sum()
    mixed = mixed[mixed > 0] / mixed.sum()
    return float(-(mixed * np.log(mixed)).sum())
