"""Uniform random tokens as a `Source`. Each token is a function of (seed, position); nothing is stored."""

import numpy as np

from forge_core.errors import DataError
from forge_data.order.permutation import key_of, mix


class RandomSource:
    """A stream of random tokens; the modulo bias is below vocab_size / 2^64."""

    text_bytes: int | None = None
    tokenizer: str | None = None
    borders_checked = True

    def __init__(self, *, vocab_size: int, tokens: int, document: int | None = None, seed: int = 0) -> None:
        """
        Args:
            vocab_size: ids are drawn from 0 to vocab_size - 1.
            tokens: length of the stream.
            document: tokens per document; by default all tokens are one document.
            seed: seed of the tokens.

        Raises:
            DataError: the largest id does not fit 32 bits.
        """
        self.name = f"random tokens of seed {seed}"
        self.tokens = tokens
        self.vocab_size: int | None = vocab_size
        self.max_id: int | None = vocab_size - 1
        self.document = document or tokens
        self.fingerprint = f"random-{seed}-{tokens}-{vocab_size}-{self.document}"
        self._key = np.uint64(key_of("random tokens", seed))
        if vocab_size > 1 << 32:
            raise DataError(f"vocab_size = {vocab_size} does not fit 32 bits; lower it")

    def read(self, start: int, stop: int) -> np.ndarray:
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens [{start}, {stop}) are not inside the {self.tokens} tokens of {self.name}")
        return self._at(np.arange(start, stop, dtype=np.uint64))

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Returns (N, length) token ids: one window from each of `starts`."""
        starts = starts.astype(np.int64)
        if len(starts) and not 0 <= int(starts.min()) <= int(starts.max()) <= self.tokens - length:
            raise IndexError(
                f"windows of {length} tokens from {starts.min()} to {starts.max()} are not inside the {self.tokens} tokens "
                f"of {self.name}"
            )
        return self._at((starts[:, None] + np.arange(length)).astype(np.uint64))

    def _at(self, positions: np.ndarray) -> np.ndarray:
        return (mix(mix(positions + self._key)) % np.uint64(self.vocab_size or 1)).astype(np.uint32)

    def ends(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Returns the document ends e with start < e <= stop."""
        stop = self.tokens if stop is None else min(stop, self.tokens)
        first = (start // self.document + 1) * self.document
        ends = np.arange(first, stop + 1, self.document, dtype=np.uint64)
        ragged = stop == self.tokens > start and self.tokens % self.document
        return np.append(ends, np.uint64(stop)) if ragged else ends

    def borders(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the document ends inside many windows; see `Source.borders`."""
        ends = [(self.ends(start, start + length) - np.uint64(start)).astype(np.int64) for start in starts.tolist()]
        rows = np.repeat(np.arange(len(ends)), [len(columns) for columns in ends])
        return rows, np.concatenate([*ends, np.empty(0, dtype=np.int64)])
