"""A `Source` that reads token files of any format in place, and the formats of llm.c and datatrove.

llm.c: a header of 256 int32 (magic, version, number of tokens, zeros), then uint16 or uint32 ids. Writers put the end-of-text
token *before* each document and begin a new file at any token, so a document may continue in the next file.

datatrove: `NAME.ds` holds raw ids, `NAME.ds.index` the uint64 document ends, counted in tokens. The last end is the number of
tokens, so the bytes per id follow from file size and index. `NAME.ds.metadata` holds the tokenizer's name and the same number. A
loss mask (`NAME.ds.loss`, one byte per token) is not applied, so a file that has one is refused unless `ignore_loss_mask` is set.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import xxhash

from forge_core.errors import DataError
from forge_core.files import lines_of
from forge_data.storage.checksums import TOKEN_BLOCK, TOKEN_BLOCKS, sampled_ranges
from forge_data.storage.files import File, find, neighbors, read_bytes, read_each
from forge_data.storage.shards import Delimited, Documents, Ends, Listed, Shard, Shards, map_file

SCANNED = 1 << 26
"""Tokens of the largest local corpus that is read completely when it is opened, to find its largest id. Of larger and remote
corpora, only samples are read."""
_PART = 1 << 22


@dataclass(frozen=True)
class TokenFilesInfo:
    """Further properties of token files; `data inspect` shows them."""

    format: str
    documents: int | None = None
    vocab_size: int | None = None
    tokenizer: str | None = None
    more: dict[str, object] = field(default_factory=dict)
    joins: Callable[[], bool] | None = None
    """Whether documents have several sequences, which are joined; None if the format has no sequences."""


class TokenFiles:
    """Tokens and documents of some files as a `Source`.

    Attributes:
        seen_id: largest id that was read when the corpus was opened.
        max_id: the same if the whole corpus was read, else None.
        described: further properties of the files.
    """

    text_bytes: int | None = None

    def __init__(
        self,
        name: str,
        shards: Shards,
        documents: Documents,
        described: TokenFilesInfo,
        identity: str,
        check: Callable[[], list[str]] | None = None,
    ) -> None:
        """Reads samples of the ids, or all of them.

        Args:
            name: name for messages.
            shards: the tokens.
            documents: the document borders.
            described: further properties of the files.
            identity: identifies the document borders in the fingerprint.
            check: reads the whole document index and returns its faults, with file and offset.

        Raises:
            DataError: there are no tokens, an id is negative, or an id exceeds the stated vocabulary; the message has file
                and offset.
        """
        if not shards.tokens:
            raise DataError(f"{name} has no tokens")
        self.name = name
        self.shards = shards
        self.documents = documents
        self.described = described
        self.check = check
        self.tokens = shards.tokens
        self.dtype = shards.dtype
        self.vocab_size = described.vocab_size
        self.tokenizer = described.tokenizer
        self.fingerprint, self.seen_id = self._sampled(identity)
        self.max_id: int | None = None
        if self.tokens <= SCANNED and not shards.remote:
            self.max_id = self.seen_id = max(
                self._largest(start, self.read(start, min(start + _PART, self.tokens))) for start in range(0, self.tokens, _PART)
            )

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns token ids [start, stop)."""
        return self.shards.read(start, stop)

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Returns (N, length) token ids: one window from each of `starts`."""
        return self.shards.windows(starts, length)

    def ends(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Returns the document ends e with start < e <= stop."""
        return self.documents.ends(start, self.tokens if stop is None else min(stop, self.tokens))

    def borders(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the document ends inside many windows; see `Source.borders`."""
        return self.documents.borders(starts, length)

    @property
    def borders_checked(self) -> bool:
        """Whether all document ends used so far come from completely checked tables."""
        return self.documents.checked

    def place(self, token: int) -> str:
        """Returns file and byte offset of a token, for messages."""
        return self.shards.place(token)

    def _sampled(self, identity: str) -> tuple[str, int]:
        """Returns (fingerprint, largest id) of sizes, dtype, borders, head, tail and 64 blocks of the stream.

        The cost does not depend on the length of the stream. The fingerprint does not depend on the location of the files,
        but on how the stream is split into files.
        """
        digest = xxhash.xxh3_128(f"{self.tokens} {self.dtype.str} {identity}".encode())
        if len(self.shards.shards) > 1:
            digest.update(np.array(self.shards.firsts, dtype="<u8").tobytes())
        high = 0
        for start, stop in sampled_ranges(self.tokens, TOKEN_BLOCK, TOKEN_BLOCKS):
            block = self.shards.peek(start, stop)
            digest.update(block.tobytes())
            high = max(high, self._largest(start, block))
        return digest.hexdigest(), high

    def _largest(self, start: int, ids: np.ndarray) -> int:
        high = int(ids.max())
        if ids.dtype.kind == "i" and int(ids.min()) < 0:
            where = int(ids.argmin())
            raise DataError(f"{self.place(start + where)} (token {start + where}): negative token id {int(ids[where])}")
        if self.vocab_size is not None and high >= self.vocab_size:
            token = start + int(np.argmax(ids >= self.vocab_size))
            raise DataError(
                f"{self.place(token)} (token {token}): id {int(ids[token - start])} is not in a vocabulary of {self.vocab_size} "
                "ids; check the dtype"
            )
        return high


def read_heads(files: Sequence[File], size: int) -> list[bytes]:
    """Returns the first `size` bytes of every file."""
    return read_each(lambda file: read_bytes(file, 0, size), files)


def same_dtype(files: Sequence[tuple[str, np.dtype]]) -> np.dtype:
    """Returns the common dtype of all files.

    Args:
        files: (file, dtype) of each file.

    Raises:
        DataError: two files have different dtypes; the message names them.
    """
    first_name, first = files[0]
    for name, dtype in files:
        if dtype != first:
            raise DataError(f"{first_name} holds {_named(first)}, but {name} holds {_named(dtype)}; use one source per dtype")
    return first


def _named(dtype: np.dtype) -> str:
    return f"big-endian {dtype.name}" if dtype.str[0] == ">" else dtype.name


def integers(where: str, dtype: np.dtype) -> np.dtype:
    """Returns `dtype` if it is an integer dtype.

    Raises:
        DataError: it is not.
    """
    if dtype.kind not in "ui":
        raise DataError(f"{where}: token ids must be integers, found {dtype.name}")
    return dtype


HEADER = 1024
_KINDS = {(20240520, 1): ("<u2", 50256), (20240801, 7): ("<u4", 128000)}
"""Maps (magic, version) to the dtype and the token that begins a document: GPT-2 and Llama 3."""
_EVALUATION = 20240522


def open_llmc(path: str, *, bos: int | None = None, vocab_size: int | None = None) -> TokenFiles:
    """Opens one file, or all files of a directory or pattern in the order of their names.

    Raises:
        DataError: a file has no header of llm.c, or its size does not match the header.
    """
    files = find(path, (".bin",), "llm.c")
    kinds, shards = [], []
    for file, head in zip(files, read_heads(files, 12), strict=True):
        kind, tokens = _read(file, head)
        kinds.append(kind)
        shards.append(Shard(file, tokens, HEADER))
    dtype = same_dtype([(file.where, np.dtype(kind[0])) for file, kind in zip(files, kinds, strict=True)])
    first = kinds[0][1] if bos is None else bos
    stream = Shards(shards, dtype)
    described = TokenFilesInfo(format="llm.c", vocab_size=vocab_size, more={"bos": first})
    return TokenFiles(path, stream, Delimited(stream, bos=first), described, f"bos {first}")


def _read(file: File, head: bytes) -> tuple[tuple[str, int], int]:
    if len(head) < 12:
        raise DataError(
            f"{file.where} is {'truncated' if head else 'empty'}: it ends at byte {file.size}, inside its header; "
            "restore the file"
        )
    magic, version, tokens = struct.unpack("<iii", head)
    if magic == _EVALUATION:
        raise DataError(f"{file.where} holds multiple-choice examples of llm.c, not a stream of tokens; remove it")
    if (magic, version) not in _KINDS:
        known = ", ".join(f"{known_magic} version {known_version}" for known_magic, known_version in _KINDS)
        raise DataError(f"{file.where} is not a token file of llm.c: magic {magic} version {version}; known: {known}")
    kind = _KINDS[magic, version]
    wanted = HEADER + tokens * np.dtype(kind[0]).itemsize
    if file.size != wanted:
        what = "truncated" if file.size < wanted else "too long"
        raise DataError(f"{file.where} is {what}: it ends at byte {file.size}, its header says {wanted}; restore the file")
    if not tokens:
        raise DataError(f"{file.where} has no tokens; remove it")
    return kind, tokens


_WIDTHS = {2: "<u2", 4: "<u4"}
_U8 = np.dtype("<u8")
Sibling = Callable[[str], File | None]


def open_datatrove(
    path: str, *, dtype: str | None = None, ignore_loss_mask: bool = False, vocab_size: int | None = None
) -> TokenFiles:
    """Opens one file, or all files of a directory or pattern in the order of their names.

    Raises:
        DataError: a file has no index, or its size, index and metadata do not match.
    """
    files = find(path, (".ds",), "datatrove")
    sibling = neighbors(files)
    if not ignore_loss_mask:
        for file in files:
            if sibling(f"{file.where}.loss"):
                raise DataError(
                    f"{file.where}.loss masks the loss of some tokens, but Forge does not apply loss masks; "
                    "set ignore_loss_mask = true to train on all tokens"
                )
    indices = [_index(file, sibling) for file in files]
    counts = [int.from_bytes(read_bytes(index, index.size - 8, index.size), "little") for index in indices]
    dtypes = [_dtype(file, tokens, dtype, sibling) for file, tokens in zip(files, counts, strict=True)]
    same = same_dtype([(file.where, file_dtype) for file, file_dtype in zip(files, dtypes, strict=True)])
    shards = Shards([Shard(file, tokens) for file, tokens in zip(files, counts, strict=True)], same)
    documents = sum(index.size // 8 for index in indices)
    listed = Listed(shards.firsts, partial(_table, indices, counts), remote=shards.remote)
    described = TokenFilesInfo("datatrove", documents, vocab_size, more={"made_with": _metadata(files[0], sibling)[0]})
    return TokenFiles(path, shards, listed, described, _identity(indices), listed.faults)


def _index(file: File, sibling: Sibling) -> File:
    index = sibling(f"{file.where}.index")
    if index is None:
        raise DataError(
            f"{file.where} has no {file.name}.index in its directory, so its documents are unknown; restore the index"
        )
    if not index.size or index.size % 8:
        raise DataError(f"{index.where} has {index.size} bytes, not a positive multiple of 8 (uint64 ends); restore the file")
    return index


def _dtype(file: File, tokens: int, stated: str | None, sibling: Sibling) -> np.dtype:
    if not tokens:
        raise DataError(f"{file.where} has no tokens; remove it")
    width, rest = divmod(file.size, tokens)
    if rest or width not in _WIDTHS:
        raise DataError(
            f"{file.where} ends at byte {file.size}, but its index says {tokens} tokens: "
            "it was truncated, or the index belongs to another file; restore both files"
        )
    dtype = np.dtype(_WIDTHS[width])
    if stated is not None and dtype != np.dtype(stated):
        raise DataError(
            f"{file.where}: {file.size} bytes for {tokens} tokens are {dtype.name}, but the recipe sets dtype = {stated!r}"
        )
    name, count = _metadata(file, sibling)
    if count is not None and count != tokens:
        raise DataError(f"{file.where}.metadata says {count} tokens, the index {tokens} (tokenizer {name}); restore both files")
    return dtype


def _metadata(file: File, sibling: Sibling) -> tuple[str | None, int | None]:
    """Returns the tokenizer's name and the number of tokens from the metadata file, or None for what is absent."""
    metadata = sibling(f"{file.where}.metadata")
    if metadata is None:
        return None, None
    lines = lines_of(read_bytes(metadata, 0, 4096).decode("utf-8", errors="replace"))
    return (lines[0] if lines else None), (int(lines[1]) if len(lines) > 1 and lines[1].isdigit() else None)


def _table(indices: Sequence[File], tokens: Sequence[int], number: int) -> Ends:
    index = indices[number]
    return Ends(map_file(index, _U8, index.size // 8), tokens[number], index.where)


def _identity(indices: list[File]) -> str:
    """Returns a digest of the sizes, heads and tails of all indices."""
    digest = xxhash.xxh3_128()
    for index in indices:
        head, tail = read_bytes(index, 0, 4096), read_bytes(index, max(0, index.size - 4096), index.size)
        digest.update(f"{index.size} ".encode() + head + tail)
    return digest.hexdigest()
