"""Reads Megatron's indexed datasets in place, and writes them: `NAME.bin` holds the ids, `NAME.idx` describes them.

The index, all little-endian: 9 bytes `MMIDIDX\\0\\0`, uint64 version 1, uint8 dtype code, uint64 n sequences, uint64 d
entries of the document list; then int32 lengths[n], int64 byte pointers[n], int64 documents[d], where document i is
sequences [documents[i], documents[i + 1]). So d is the number of documents plus one. The writer stores each document as one
sequence, as Megatron's own preprocessing does for language models.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import xxhash

from forge_core.errors import DataError
from forge_core.files import publish, sync
from forge_data.sources.token_files import TokenFiles, TokenFilesInfo, integers, same_dtype
from forge_data.storage.files import File, find, find_one, neighbors, read_bytes
from forge_data.storage.shards import Listed, Shard, Shards, blocks_of, distinct, map_file, refuse_shrunk
from forge_data.storage.workspace import Partial

MAGIC = b"MMIDIDX\x00\x00"
HEAD = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
_I4, _I8 = np.dtype("<i4"), np.dtype("<i8")
_BLOCK = 4096
_CODES = {np.dtype(name): code for code, name in DTYPES.items() if name[1] in "ui"}
_HELD = {"uint32": "int32", "uint64": "int64"}
_LARGEST_SEQUENCE = 2**31 - 1


@dataclass(frozen=True)
class Pair:
    """One dataset: both files and the header of the index.

    Attributes:
        entries: length of the document list: the number of documents plus one.
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
    """The arrays of one index as a table of document ends. It never copies an array as long as the index.

    The arrays are unaligned, because the header has 34 bytes, and numpy copies an unaligned array before it searches it.
    So `search` replaces numpy's search: log2(n) steps for all keys together.

    Attributes:
        lengths: (n,) int32 number of tokens of each sequence.
        pointers: (n,) int64 byte offset of each sequence.
        documents: (d,) int64 first sequence of each document, then n.
    """

    def __init__(self, pair: Pair) -> None:
        n, head = pair.sequences, HEAD.size
        self._pair = pair
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
        return distinct(rows, columns)

    def __len__(self) -> int:
        return max(len(self.pointers), len(self.documents))

    def faults(self, whole: bool) -> list[str]:
        faults = []
        where, n = self._pair.index.where, self._pair.sequences
        for start, stop in blocks_of(n, whole):
            lengths, pointers = self.lengths[start:stop].astype(np.int64), self.pointers[start : stop + 1]
            negative = np.flatnonzero(lengths < 0)
            expected = pointers[: len(lengths)] + lengths * self._itemsize
            wrong = np.flatnonzero(expected[: len(pointers) - 1] != pointers[1:])
            if len(negative):
                number = start + int(negative[0])
                faults.append(f"{where} at byte {HEAD.size + 4 * number}: sequence {number} has a negative length")
            elif len(wrong):
                number = start + int(wrong[0]) + 1
                offset = HEAD.size + 4 * n + 8 * number
                faults.append(f"{where} at byte {offset}: sequence {number} does not begin where sequence {number - 1} ends")
        for start, stop in blocks_of(len(self.documents), whole):
            documents = self.documents[start : stop + 1]
            wrong = np.flatnonzero((np.diff(documents, prepend=documents[:1]) < 0) | (documents < 0) | (documents > n))
            if len(wrong):
                number = start + int(wrong[0])
                what = "after the last sequence" if documents[wrong[0]] > n else "before the previous document"
                faults.append(f"{where} at byte {HEAD.size + 12 * n + 8 * number}: document {number} begins {what}")
        return faults

    def _ended(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the number of documents that end at or before each token position."""
        refuse_shrunk(self.pointers, self._pair.index.where)
        refuse_shrunk(self.documents, self._pair.index.where)
        sequences = search(self.pointers, tokens * self._itemsize) - 1
        sequences[tokens >= self._tokens] = len(self.pointers)
        return search(self.documents, sequences) - 1

    def _at(self, documents: np.ndarray) -> np.ndarray:
        """Returns the token positions at which documents end."""
        sequences = self.documents[documents + 1]
        inside = sequences < len(self.pointers)
        ends = np.full(len(sequences), self._tokens, dtype=np.int64)
        ends[inside] = self.pointers[sequences[inside]] // self._itemsize
        return ends


def search(array: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Returns `np.searchsorted(array, keys, side="right")` without copying `array`, which may be unaligned."""
    low, high = np.zeros(len(keys), dtype=np.int64), np.full(len(keys), len(array), dtype=np.int64)
    for _ in range(len(array).bit_length()):
        middle = (low + high) >> 1
        open_ = low < high
        below = np.zeros(len(keys), dtype=bool)
        below[open_] = array[middle[open_]] <= keys[open_]
        low = np.where(below, middle + 1, low)
        high = np.where(open_ & ~below, middle, high)
    return low


def open_megatron(path: str, *, vocab_size: int | None = None) -> TokenFiles:
    """Opens one dataset, or all datasets of a directory or pattern in the order of their names.

    Raises:
        DataError: see `pairs`.
    """
    datasets = pairs(path)
    dtype = same_dtype([(pair.index.where, pair.dtype) for pair in datasets])
    shards = Shards([Shard(pair.ids, pair.tokens) for pair in datasets], dtype)
    described = TokenFilesInfo(
        format="megatron",
        documents=sum(pair.entries - 1 for pair in datasets),
        vocab_size=vocab_size,
        more={"sequences": sum(pair.sequences for pair in datasets)},
        joins=partial(_joins, datasets),
    )
    remote = any(pair.index.remote for pair in datasets)
    listed = Listed(shards.firsts, partial(_index, datasets), remote=remote, advice="restore the index")
    return TokenFiles(path, shards, listed, described, _identity(datasets), listed.faults)


def pairs(path: str) -> list[Pair]:
    """Returns the datasets that a prefix, one of the two files, a directory or a pattern names.

    Raises:
        DataError: a file is missing, or index and ids do not match; the message has the byte offset.
    """
    prefix = path.removesuffix(".idx").removesuffix(".bin")
    single = find_one(f"{prefix}.idx")
    if single is None and find_one(f"{prefix}.bin"):
        raise DataError(f"{prefix}.bin has no index {prefix}.idx; restore it, or read raw ids with source 'tokens'")
    indices = [single] if single else find(path, (".idx",), "Megatron index")
    sibling = neighbors(indices)
    return [_pair(index, sibling) for index in indices]


def _joins(datasets: Sequence[Pair]) -> bool:
    """Whether a document has more than one sequence."""
    for pair in datasets:
        documents = Index(pair).documents
        for start in range(0, pair.entries, _BLOCK):
            if (np.diff(documents[start : start + _BLOCK + 1]) > 1).any():
                return True
    return False


def _index(datasets: Sequence[Pair], number: int) -> Index:
    return Index(datasets[number])


def _pair(index: File, sibling: Callable[[str], File | None]) -> Pair:
    prefix = index.where.removesuffix(".idx")
    ids = sibling(f"{prefix}.bin")
    if ids is None:
        raise DataError(f"{index.where} has no ids file {prefix}.bin; restore it")
    head = read_bytes(index, 0, HEAD.size)
    if head[: len(MAGIC)] != MAGIC:
        raise DataError(f"{index.where} is not a Megatron index: it begins with {head[:9]!r}; restore the file")
    if len(head) < HEAD.size:
        raise DataError(f"{index.where} is truncated: it ends at byte {len(head)}, inside its header; restore the file")
    _, version, code, sequences, entries = HEAD.unpack(head)
    if version != 1 or code not in DTYPES:
        raise DataError(f"{index.where}: version {version} with dtype code {code}; this Forge reads version 1, codes 1 to 8")
    pair = Pair(ids, index, integers(index.where, np.dtype(DTYPES[code])), sequences, entries)
    wanted = HEAD.size + 12 * sequences + 8 * entries
    if index.size == wanted + sequences and sequences:
        raise DataError(f"{index.where} is multimodal (a mode per sequence), which source 'megatron' does not support")
    if index.size != wanted:
        what = "truncated" if index.size < wanted else "too long"
        raise DataError(f"{index.where} is {what}: it ends at byte {index.size}, its header says {wanted}; restore the file")
    if not sequences or entries < 2:
        raise DataError(f"{index.where} lists {sequences} sequences and {max(0, entries - 1)} documents: nothing to read")
    _fits(pair)
    return pair


def _fits(pair: Pair) -> None:
    """Compares the first and last entries of the index with the size of the ids file."""
    n, head = pair.sequences, HEAD.size

    def number(offset: int, dtype: np.dtype) -> int:
        return int(np.frombuffer(read_bytes(pair.index, offset, offset + dtype.itemsize), dtype)[0])

    first, last = number(head + 4 * n, _I8), number(head + 12 * n - 8, _I8)
    wanted = last + number(head + 4 * n - 4, _I4) * pair.dtype.itemsize
    if first:
        raise DataError(
            f"{pair.index.where} at byte {head + 4 * n}: the first sequence begins at byte {first} of the ids, not 0; "
            "restore the file"
        )
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
            f"not 0 and {n}; restore the file"
        )


def _identity(datasets: Sequence[Pair]) -> str:
    """Returns a digest of the counts, heads and tails of all document lists."""
    digest = xxhash.xxh3_128()
    for pair in datasets:
        start = pair.index.size - 8 * pair.entries
        digest.update(f"{pair.sequences} {pair.entries} ".encode())
        digest.update(read_bytes(pair.index, start, min(start + 4096, pair.index.size)))
        digest.update(read_bytes(pair.index, max(start, pair.index.size - 4096), pair.index.size))
    return digest.hexdigest()


class MegatronWriter:
    """Writes one dataset. Use it as a context manager; without `commit`, both files are removed on exit."""

    def __init__(self, prefix: Path, dtype: str) -> None:
        """Creates the unfinished files of `prefix.bin` and `prefix.idx`, which must not exist.

        Args:
            prefix: path without suffix.
            dtype: dtype of the ids; the format lacks uint32 and uint64, which are written as int32 and int64.

        Raises:
            DataError: a file exists, the directory is not writable, or the format lacks the dtype.
        """
        self.prefix = prefix
        self.dtype = np.dtype(_HELD.get(dtype, dtype)).newbyteorder("<")
        if self.dtype not in _CODES:
            raise DataError(f"Megatron's format has no dtype {dtype!r}; choose one of {', '.join(d.name for d in _CODES)}")
        self._targets = [prefix.with_name(f"{prefix.name}{suffix}") for suffix in (".bin", ".idx")]
        if existing := next((target for target in self._targets if target.exists()), None):
            raise DataError(f"{existing} exists; choose another path or remove it")
        self._lengths: list[np.ndarray] = []
        try:
            self._owned = [Partial(target, directory=False) for target in self._targets]
            self._partials = [owned.path for owned in self._owned]
            self._file = self._partials[0].open("wb")
        except OSError as error:
            raise DataError(f"{prefix.parent} cannot be written: {error.strerror}; choose another directory") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        for owned in self._owned:
            owned.close()

    def add(self, ids: np.ndarray, ends: np.ndarray) -> None:
        """Appends whole documents; see `StoreWriter.add`.

        Raises:
            DataError: an id does not fit the dtype, a document is longer than 2^31 - 1 tokens, or the disk is full.
        """
        if not len(ids):
            return
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high > np.iinfo(self.dtype).max:
            raise DataError(f"token id {low if low < 0 else high} does not fit {self.dtype.name}; choose a larger dtype")
        lengths = np.diff(np.asarray(ends, dtype=np.int64), prepend=0)
        if int(lengths.max()) > _LARGEST_SEQUENCE:
            raise DataError(f"a document of {int(lengths.max())} tokens is longer than the format allows ({_LARGEST_SEQUENCE})")
        self._lengths.append(lengths.astype("<i4"))
        try:
            self._file.write(ids.astype(self.dtype, copy=False).tobytes())
        except OSError as error:
            raise DataError(f"{self._partials[0]} cannot be written: {error.strerror}") from error

    def commit(self) -> int:
        """Writes the index, renames both files (the index last), and returns the number of documents.

        Raises:
            DataError: no document was added, or the disk is full.
        """
        if not self._lengths:
            raise DataError(f"{self.prefix} has no documents; nothing to write")
        lengths = np.concatenate(self._lengths)
        pointers = np.zeros(len(lengths), dtype="<i8")
        np.cumsum(lengths[:-1].astype(np.int64) * self.dtype.itemsize, out=pointers[1:])
        head = HEAD.pack(MAGIC, 1, _CODES[self.dtype], len(lengths), len(lengths) + 1)
        try:
            sync(self._file)
            self._file.close()
            with self._partials[1].open("wb") as index:
                index.write(head)
                for array in (lengths, pointers, np.arange(len(lengths) + 1, dtype="<i8")):
                    index.write(array.data)
                sync(index)
            for partial, target in zip(self._partials, self._targets, strict=True):
                publish(partial, target)
        except OSError as error:
            raise DataError(f"{self.prefix} cannot be written: {error.strerror}") from error
        return len(lengths)
