"""Any source read to its end: its documents in portions of bounded size, how often each token occurs, and the unigram entropy."""

from collections.abc import Iterator, Sequence

import numpy as np

from forge_core.errors import DataError
from forge_core.protocols.data import Source

PORTION = 1 << 22
_BLOCK = 1 << 22


def portions(source: Source, tokens: int = PORTION) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(stream position of the first token, ids, document ends in `ids`, int64): about `tokens` at a time.

    A document that is longer comes alone. Tokens after the last end, which no well-formed source has, count as one more.
    """
    start = 0
    while start < source.tokens:
        size = tokens
        while not len(ends := source.ends(start, min(start + size, source.tokens))) and start + size < source.tokens:
            size *= 2
        ends = ends if size == tokens else ends[:1]
        stop = int(ends[-1]) if len(ends) else source.tokens
        refuse_falling(ends, start, source)
        found = ends.astype(np.int64) - start if len(ends) else np.array([stop - start])
        yield start, source.read(start, stop), found
        start = stop


def refuse_falling(ends: np.ndarray, start: int, source: Source) -> None:
    """Refuses document ends that do not ascend from `start`, or go beyond the last token.

    Raises:
        DataError: naming the source.
    """
    if len(ends) and (int(ends[0]) <= start or int(ends[-1]) > source.tokens or (ends[1:] <= ends[:-1]).any()):
        raise DataError(f"{source.name}: document ends do not ascend; `data verify` names the file and the byte")


def place_of(source: Source, token: int) -> str:
    """Where a token lies: file and byte offset, if the source can tell."""
    place = getattr(source, "place", None)
    return str(place(token)) if callable(place) else f"{source.name} at token {token}"


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
