"""Reads any source to its end: documents in portions of bounded size, counts of every token id, unigram entropy."""

from collections.abc import Iterator, Sequence

import numpy as np

from forge_core.errors import DataError
from forge_core.protocols.data import Source, SourceWithMask

PORTION = 1 << 22
_BLOCK = 1 << 22


def portions(source: Source, tokens: int = PORTION) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yields (stream position of the first token, ids, int64 document ends in `ids`), about `tokens` ids at a time.

    A longer document is a portion of its own. Tokens after the last end, which no valid source has, form one more document.
    """
    start = 0
    while start < source.tokens:
        size = tokens
        while not len(ends := source.ends(start, min(start + size, source.tokens))) and start + size < source.tokens:
            size *= 2
        ends = ends if size == tokens else ends[:1]
        stop = int(ends[-1]) if len(ends) else source.tokens
        refuse_falling(ends, start, source)
        local_ends = ends.astype(np.int64) - start if len(ends) else np.array([stop - start])
        yield start, source.read(start, stop), local_ends
        start = stop


def mask_of(source: Source, start: int, stop: int) -> np.ndarray | None:
    """Returns (stop - start,) bool: whether each token is trained; None for a source without a loss mask. Of labeled texts,
    uint8: 1 + the label of each token's document."""
    if getattr(source, "labels", ()):
        return source.classes(start, stop)  # type: ignore[attr-defined]
    return source.learned(start, stop) if isinstance(source, SourceWithMask) else None


def refuse_falling(ends: np.ndarray, start: int, source: Source) -> None:
    """Refuses document ends that do not ascend from `start`, or that exceed the last token.

    Raises:
        DataError: the message names the source.
    """
    if len(ends) and (int(ends[0]) <= start or int(ends[-1]) > source.tokens or (ends[1:] <= ends[:-1]).any()):
        raise DataError(f"{source.name}: document ends do not ascend; run `data verify` to find the file and the byte")


def place_of(source: Source, token: int) -> str:
    """Returns file and byte offset of a token if the source provides them, else its position in the stream."""
    place = getattr(source, "place", None)
    return str(place(token)) if callable(place) else f"{source.name} at token {token}"


def token_counts(source: Source) -> np.ndarray:
    """Returns (ids,) int64 counts of every token id: those recorded in a store, or else by reading the source once."""
    recorded = getattr(source, "counts", None)
    if callable(recorded):
        return np.asarray(recorded())
    counts = np.zeros(0, dtype=np.int64)
    for start in range(0, source.tokens, _BLOCK):
        block = np.bincount(source.read(start, min(start + _BLOCK, source.tokens)).astype(np.int64), minlength=len(counts))
        block[: len(counts)] += counts
        counts = block
    return counts


def unigram_entropy(counts: Sequence[np.ndarray], weights: Sequence[float] = (1.0,)) -> float:
    """Returns -sum p ln p in nats per token, where p is the mixture by `weights` of the frequencies in `counts`."""
    mixed = np.zeros(max(len(own) for own in counts))
    for own, weight in zip(counts, weights, strict=True):
        mixed[: len(own)] += weight * own / own.sum()
    mixed = mixed[mixed > 0] / mixed.sum()
    return float(-(mixed * np.log(mixed)).sum())
