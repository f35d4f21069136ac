"""A random order of n rows that is computed instead of stored: a counter-based permutation.

A Feistel network (Luby and Rackoff, 1988) on b bits, 2^(b-1) < n <= 2^b, is a bijection of [0, 2^b). If its result is
outside [0, n), it is applied again until the result is inside ("cycle walking", Black and Rogaway, 2002), on average fewer
than two times; this is a bijection of [0, n). The key is derived from (seed, source, epoch), so every epoch of every source
has a different order, and row i of the order is computed in O(1) time and memory.
"""

from hashlib import blake2b

import numpy as np

ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_A = np.uint64(0xBF58476D1CE4E5B9)
_B = np.uint64(0x94D049BB133111EB)


def key_of(*parts: object) -> int:
    """Returns a 64-bit key from the text of `parts`; equal on every machine."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def mix(values: np.ndarray) -> np.ndarray:
    """Applies a bijection of uint64 with pseudo-random output (finalizer of SplitMix64, Steele et al., 2014)."""
    values = (values ^ (values >> np.uint64(30))) * _A
    values = (values ^ (values >> np.uint64(27))) * _B
    return values ^ (values >> np.uint64(31))


def permute(indices: np.ndarray, size: int, key: int, epochs: np.ndarray) -> np.ndarray:
    """Maps indices to rows by a random permutation.

    Args:
        indices: (N,) integers in [0, size).
        size: number of rows.
        key: key of (seed, source).
        epochs: (N,) epoch of each index; each epoch has its own permutation.

    Returns:
        (N,) int64 rows in [0, size).
    """
    if size < 1:
        raise ValueError(f"a permutation needs at least one row, got {size}")
    rows = np.asarray(indices).astype(np.uint64)
    if size == 1 or not len(rows):
        return rows.astype(np.int64)
    bits = max(2, (size - 1).bit_length())
    keys = _round_keys(key, np.asarray(epochs).astype(np.uint64))
    rows = _feistel(rows, bits, keys)
    outside = np.flatnonzero(rows >= size)
    while len(outside):
        own = keys if keys.shape[1] == 1 else keys[:, outside]
        walked = _feistel(rows[outside], bits, own)
        rows[outside] = walked
        outside = outside[walked >= size]
    return rows.astype(np.int64)


def permute_blocks(indices: np.ndarray, size: int, key: int, epochs: np.ndarray, block: int, window: int) -> np.ndarray:
    """Like `permute`, but neighboring rows are read at nearby times, for storage with slow random access.

    Blocks of `block` rows are put into a random order; then rows are permuted within each window of `window` blocks. So at any
    time rows come only from `window` blocks, and every epoch is still a bijection that is computed in O(1). The last
    size mod `block` rows, which do not fill a block, belong to the last window.
    """
    blocks = size // block
    whole, span = blocks * block, block * window
    windows = max(1, blocks // window)
    indices = np.asarray(indices, dtype=np.int64)
    epochs = np.asarray(epochs, dtype=np.int64)
    number = np.minimum(indices // span, windows - 1)
    first = number * span
    places = np.empty_like(indices)
    # All windows have `span` rows except the last, which has the remaining rows.
    last = number == windows - 1
    for own, rows in ((np.flatnonzero(~last), span), (np.flatnonzero(last), size - (windows - 1) * span)):
        if len(own):
            counters = epochs[own] * windows + number[own]
            places[own] = first[own] + permute(indices[own] - first[own], rows, key ^ 1, counters)
    inside = np.flatnonzero(places < whole)
    if len(inside):
        put, offsets = np.divmod(places[inside], block)
        places[inside] = permute(put, blocks, key, epochs[inside]) * block + offsets
    return places


def _round_keys(key: int, epochs: np.ndarray) -> np.ndarray:
    """Returns (ROUNDS, N) keys, or (ROUNDS, 1) if all indices belong to one epoch."""
    if (epochs == epochs[0]).all():
        epochs = epochs[:1]
    rounds = np.arange(1, ROUNDS + 1, dtype=np.uint64)[:, None]
    return mix(mix(np.array([key], dtype=np.uint64) + epochs * _GOLDEN) + rounds * _GOLDEN)


def _feistel(values: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    """Applies all rounds; each changes one half by a function of the other. The halves may differ by one bit in length."""
    low = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    left, right = values >> low, values & low_mask
    for number in range(ROUNDS):
        if number % 2 == 0:
            left = left ^ (mix(right + keys[number]) & high_mask)
        else:
            right = right ^ (mix(left + keys[number]) & low_mask)
    return (left << low) | right
