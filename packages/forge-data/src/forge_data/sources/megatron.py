"""Megatron's indexed datasets, read in place: `NAME.bin` holds the ids, `NAME.idx` what they are.

The index, all little-endian: 9 bytes `MMIDIDX\\0\\0`, uint64 version 1, uint8 dtype code, uint64 n sequences, uint64 d
entries of the document list; then int32 lengths[n], int64 byte pointers[n], int64 documents[d], where document i is
sequences [documents[i], documents[i + 1]). So d is one more than there are documents.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import xxhash

from forge_core.errors import DataError
from forge_data.components.sources import Megatron
from forge_data.sources.borders import Listed
from forge_data.sources.corpus import Corpus, Described, integers, same_dtype
from forge_data.sources.files import File, find, find_one, neighbours
from forge_data.sources.shards import Shard, Shards, map_file

MAGIC = b"MMIDIDX\x00\x00"
HEAD = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_I4, _I8 = np.dtype("<i4"), np.dtype("<i8")
_BLOCK = 4096
_CHECKED = 32
"""So many datasets, and so many blocks of each index, are compared with themselves when they are opened."""


@dataclass(frozen=True)
class Pair:
    """One dataset: both files and what the head of the index says.

    Attributes:
        entries: of the document list, one more than there are documents.
    """

    ids: File
    index: File
    dtype: np.dtype
    sequences: int
    entries: int

    @property
    def tokens(self) -> int:
        return self.ids.size // self.dtype.itemsize


class Index:
    """The arrays of one index as a table of document ends; nothing of the length of the index is ever copied.

    The arrays are never aligned (34 bytes stand before them), and numpy copies an unaligned array whole to search it.
    So the searches here are our own: log2(n) steps for all keys together.

    Attributes:
        lengths: (n,) int32 tokens of each sequence.
        pointers: (n,) int64 bytes before each sequence.
        documents: (d,) int64 first sequence of each document, then n.
    """

    def __init__(self, pair: Pair) -> None:
        n, head = pair.sequences, HEAD.size
        self.lengths = map_file(pair.index, _I4, n, head)
        self.pointers = map_file(pair.index, _I8, n, head + 4 * n)
        self.documents = map_file(pair.index, _I8, pair.entries, head + 12 * n)
        self._itemsize = pair.dtype.itemsize
        self._tokens = pair.tokens

    def ends(self, start: int, stop: int) -> np.ndarray:
        low, high = self._ended(np.array([start, stop])).tolist()
        return np.unique(self._at(np.arange(low, high))).astype(np.uint64)

    def borders(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        starts = starts.astype(np.int64)
        ended = self._ended(np.concatenate([starts, starts + length]))
        low, counts = ended[: len(starts)], ended[len(starts) :] - ended[: len(starts)]
        rows = np.repeat(np.arange(len(starts)), counts)
        numbers = np.arange(len(rows)) + np.repeat(low - (np.cumsum(counts) - counts), counts)
        columns = self._at(numbers) - starts[rows]
        # Documents without a token end where the one before them ended: that is one border.
        new = np.ones(len(rows), dtype=bool)
        new[1:] = (columns[1:] != columns[:-1]) | (rows[1:] != rows[:-1])
        return rows[new], columns[new]

    def _ended(self, tokens: np.ndarray) -> np.ndarray:
        """How many documents end at or before each place."""
        sequences = search(self.pointers, tokens * self._itemsize) - 1
        sequences[tokens >= self._tokens] = len(self.pointers)
        return search(self.documents, sequences) - 1

    def _at(self, documents: np.ndarray) -> np.ndarray:
        """Where documents end, in tokens."""
        sequences = self.documents[documents + 1]
        inside = sequences < len(self.pointers)
        ends = np.full(len(sequences), self._tokens, dtype=np.int64)
        ends[inside] = self.pointers[sequences[inside]] // self._itemsize
        return ends


def search(array: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """`np.searchsorted(array, keys, side="right")` that never copies `array`; `array` ascends and may be unaligned."""
    low, high = np.zeros(len(keys), dtype=np.int64), np.full(len(keys), len(array), dtype=np.int64)
    for _ in range(len(array).bit_length()):
        middle = (low + high) >> 1
        open_ = low < high
        below = np.zeros(len(keys), dtype=bool)
        below[open_] = array[middle[open_]] <= keys[open_]
        low = np.where(below, middle + 1, low)
        high = np.where(open_ & ~below, middle, high)
    return low


def open_megatron(component: Megatron) -> Corpus:
    """Opens one dataset, or all of a directory or pattern in the order of their names.

    Raises:
        DataError: see `pairs`.
    """
    found = pairs(component.path)
    dtype = same_dtype([(pair.index.where, pair.dtype) for pair in found])
    shards = Shards([Shard(pair.ids, pair.tokens) for pair in found], dtype)
    described = Described(
        format="megatron",
        documents=sum(pair.entries - 1 for pair in found),
        vocab_size=component.vocab_size,
        more={"sequences": sum(pair.sequences for pair in found)},
    )
    listed = Listed(shards.firsts, partial(_index, found))
    return Corpus(component.path, shards, listed, described, _identity(found), partial(_check, found))


def pairs(path: str) -> list[Pair]:
    """The datasets that a prefix, one of the two files, a directory or a pattern names.

    Raises:
        DataError: a file is missing, or index and ids do not fit each other; says at which byte.
    """
    prefix = path.removesuffix(".idx").removesuffix(".bin")
    one = find_one(f"{prefix}.idx")
    if one is None and find_one(f"{prefix}.bin"):
        raise DataError(f"{prefix}.bin has no {prefix}.idx beside it; restore it, or read raw ids with source 'tokens'")
    indices = [one] if one else find(path, (".idx",), "Megatron index")
    beside = neighbours(indices)
    found = [_pair(index, beside) for index in indices]
    for pair in found[:: max(1, len(found) // _CHECKED)]:
        if pair.index.remote:
            continue
        blocks = all_blocks(pair)
        if wrong := faults(pair, Index(pair), blocks[:: max(1, len(blocks) // _CHECKED)]):
            raise DataError(f"{wrong[0]}; restore the index")
    return found


def faults(pair: Pair, index: Index, blocks: Sequence[int]) -> list[str]:
    """What is wrong with parts of an index, one message each; `blocks` are the first sequences of blocks of 4,096."""
    found = []
    for start in blocks:
        stop = min(start + _BLOCK, pair.sequences)
        lengths, pointers = index.lengths[start:stop].astype(np.int64), index.pointers[start : stop + 1]
        negative = np.flatnonzero(lengths < 0)
        expected = pointers[: len(lengths)] + lengths * pair.dtype.itemsize
        wrong = np.flatnonzero(expected[: len(pointers) - 1] != pointers[1:])
        if len(negative):
            number = start + int(negative[0])
            found.append(f"{pair.index.where} at byte {HEAD.size + 4 * number}: sequence {number} has a negative length")
        elif len(wrong):
            number = start + int(wrong[0]) + 1
            offset = HEAD.size + 4 * pair.sequences + 8 * number
            found.append(f"{pair.index.where} at byte {offset}: sequence {number} does not begin where the one before it ends")
        part = slice(start, min(start + _BLOCK, pair.entries) + 1)
        falling = np.flatnonzero(np.diff(index.documents[part]) < 0)
        if len(falling):
            number = start + int(falling[0]) + 1
            offset = HEAD.size + 12 * pair.sequences + 8 * number
            found.append(f"{pair.index.where} at byte {offset}: document {number} begins before the one before it")
    return found


def all_blocks(pair: Pair) -> list[int]:
    """The first sequences of all blocks of an index."""
    return list(range(0, max(pair.sequences, pair.entries), _BLOCK))


def _check(found: Sequence[Pair]) -> list[str]:
    """Everything that is wrong with the indices."""
    wrong = []
    for pair in found:
        index = Index(pair)
        wrong += faults(pair, index, all_blocks(pair))
        lengths = np.diff(np.append(index.pointers, pair.ids.size)[index.documents[:-1]], append=pair.ids.size)
        if empty := np.flatnonzero(lengths == 0).tolist():
            wrong.append(f"{pair.index.where}: {len(empty)} documents have no token, the first is document {empty[0]}")
    return wrong


def _index(found: Sequence[Pair], number: int) -> Index:
    return Index(found[number])


def _pair(index: File, beside: Callable[[str], File | None]) -> Pair:
    prefix = index.where.removesuffix(".idx")
    ids = beside(f"{prefix}.bin")
    if ids is None:
        raise DataError(f"{index.where} has no {prefix}.bin beside it; restore it")
    head = index.read(0, HEAD.size)
    if head[: len(MAGIC)] != MAGIC:
        raise DataError(f"{index.where} is no Megatron index: it begins with {head[:9]!r}")
    if len(head) < HEAD.size:
        raise DataError(f"{index.where} is truncated: it ends at byte {len(head)}, inside its header")
    _, version, code, sequences, entries = HEAD.unpack(head)
    if version != 1 or code not in DTYPES:
        raise DataError(f"{index.where}: version {version} with dtype code {code}; this Forge reads version 1, codes 1 to 8")
    pair = Pair(ids, index, integers(index.where, np.dtype(DTYPES[code])), sequences, entries)
    wanted = HEAD.size + 12 * sequences + 8 * entries
    if index.size == wanted + sequences and sequences:
        raise DataError(f"{index.where} has a mode for every sequence: it is multimodal, which source 'megatron' does not read")
    if index.size != wanted:
        what = "truncated" if index.size < wanted else "too long"
        raise DataError(f"{index.where} is {what}: it ends at byte {index.size}, its header says {wanted}; restore the file")
    if not sequences or entries < 2:
        raise DataError(f"{index.where} lists {sequences} sequences and {max(0, entries - 1)} documents: nothing to read")
    _fits(pair)
    return pair


def _fits(pair: Pair) -> None:
    """Compares both files at their ends."""
    n, head = pair.sequences, HEAD.size

    def number(offset: int, dtype: np.dtype) -> int:
        return int(np.frombuffer(pair.index.read(offset, offset + dtype.itemsize), dtype)[0])

    first, last = number(head + 4 * n, _I8), number(head + 12 * n - 8, _I8)
    wanted = last + number(head + 4 * n - 4, _I4) * pair.dtype.itemsize
    if first:
        raise DataError(f"{pair.index.where} at byte {head + 4 * n}: the first sequence begins at byte {first} of the ids, not 0")
    if pair.ids.size != wanted:
        what = "empty" if not pair.ids.size else "truncated" if pair.ids.size < wanted else "too long"
        raise DataError(
            f"{pair.ids.where} is {what}: it ends at byte {pair.ids.size}, its index says {wanted} ({pair.dtype.name}); "
            "restore both files"
        )
    edges = number(head + 12 * n, _I8), number(pair.index.size - 8, _I8)
    if edges != (0, n):
        raise DataError(
            f"{pair.index.where} at byte {head + 12 * n}: documents begin at sequence {edges[0]} and end at {edges[1]}, "
            f"not 0 and {n}"
        )


def _identity(found: Sequence[Pair]) -> str:
    """Of counts and both ends of every document list."""
    digest = xxhash.xxh3_128()
    for pair in found:
        start = pair.index.size - 8 * pair.entries
        digest.update(f"{pair.sequences} {pair.entries} ".encode())
        digest.update(pair.index.read(start, min(start + 4096, pair.index.size)))
        digest.update(pair.index.read(max(start, pair.index.size - 4096), pair.index.size))
    return digest.hexdigest()
