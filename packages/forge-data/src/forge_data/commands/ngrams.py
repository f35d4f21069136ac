"""Runs of n words as 64-bit hashes, for many megabytes a second: all of it is arithmetic on whole arrays.

Words are what is left when text is lowered and everything but letters, digits and other symbols beyond ASCII is taken
for a gap. The hash of a word is a polynomial in its bytes, and that of a run a polynomial in its words, both modulo
2^64, so that every run comes from two cumulative sums (Karp and Rabin, 1987). Equal runs have equal hashes; a hash that
is found is compared word by word afterwards.
"""

import numpy as np

_BYTE_BASE, _WORD_BASE = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95
_ODD = np.uint64(0xBF58476D1CE4E5B9)
_GAPS = dict.fromkeys((*range(8192, 8304), 12288, 12289, 12290), " ")
"""Spaces, dashes and quotation marks beyond ASCII, and their like in CJK."""


def normalized(text: str) -> bytes:
    """Lowered text as UTF-8, marks beyond ASCII as spaces."""
    lowered = text.lower()
    return (lowered if lowered.isascii() else lowered.translate(_GAPS)).encode("utf-8", errors="replace")


def words_of(text: str) -> list[bytes]:
    """The words of a text."""
    content = normalized(text)
    return [content[start:stop] for start, stop in zip(*(edge.tolist() for edge in word_edges(content)), strict=True)]


def word_edges(content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """(starts, stops) of the words in normalized text."""
    inside = np.zeros(len(content) + 2, dtype=bool)
    inside[1:-1] = _letters()[np.frombuffer(content, dtype=np.uint8)]
    turns = np.flatnonzero(inside[1:] != inside[:-1])
    return turns[::2], turns[1::2]


def run_hashes(text: str, n: int) -> np.ndarray:
    """(runs,) uint64 of every run of `n` words, in order."""
    content = normalized(text)
    starts, stops = word_edges(content)
    if len(starts) < n:
        return np.empty(0, dtype=np.uint64)
    # A zero byte would add nothing, at any place; ids from 1 make every byte count.
    letters = np.frombuffer(content, dtype=np.uint8).astype(np.uint64) + np.uint64(1)
    words = _polynomials(letters, starts, stops, _BYTE_BASE)
    words = (words ^ (words >> np.uint64(29))) * _ODD + (stops - starts).astype(np.uint64)
    first = np.arange(len(words) - n + 1)
    return _polynomials(words, first, first + n, _WORD_BASE)


def _polynomials(values: np.ndarray, starts: np.ndarray, stops: np.ndarray, base: int) -> np.ndarray:
    """sum over i in [start, stop) of values[i] base^(i - start), modulo 2^64."""
    powers = _powers(base, len(values))
    sums = np.zeros(len(values) + 1, dtype=np.uint64)
    np.cumsum(values * powers, out=sums[1:])
    inverse = _powers(pow(base, -1, 1 << 64), len(values))
    return (sums[stops] - sums[starts]) * inverse[starts]


def _powers(base: int, count: int) -> np.ndarray:
    """(count,) uint64 base^0, base^1, ..., modulo 2^64."""
    steps = np.full(count, base, dtype=np.uint64)
    steps[0] = 1
    return np.multiply.accumulate(steps)


def _letters() -> np.ndarray:
    """(256,) whether a byte of lowered UTF-8 belongs to a word."""
    table = np.zeros(256, dtype=bool)
    table[[*b"0123456789abcdefghijklmnopqrstuvwxyz"]] = True
    table[128:] = True
    return table
