"""Files of token ids and nothing else: `.npy`, or raw integers of a stated dtype, which is never guessed."""

import io
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from forge_core.errors import DataError
from forge_data.sources.tokens.containers import foreign_content
from forge_data.sources.tokens.token_files import Corpus, Described, integers, same_dtype
from forge_data.storage.document_ends import Delimited
from forge_data.storage.file import File
from forge_data.storage.files import find, neighbors, read_bytes
from forge_data.storage.latency import read_each
from forge_data.storage.shards import Shard, Shards

SUFFIXES = (".npy", ".bin")
_NPY_MAGIC = b"\x93NUMPY"
_HEAD = 256


class Header(NamedTuple):
    """Where a file's tokens begin, how many there are, and their dtype."""

    offset: int
    tokens: int
    dtype: np.dtype


def open_tokens(
    path: str,
    *,
    dtype: str | None = None,
    eos: int | None = None,
    bos: int | None = None,
    vocab_size: int | None = None,
) -> Corpus:
    """Opens a file, the files of a directory, or those that a pattern matches.

    Args:
        path: a file, directory, pattern or URL.
        dtype: of raw files, which need it; that of a `.npy` file is in its header.
        eos: id of the token that ends a document.
        bos: id of the token that begins a document; not together with `eos`.
        vocab_size: of the tokenizer that made the files, if known.

    Raises:
        DataError: a file is missing, empty, cut off, of another dtype than the others or of another format; or no dtype
            is known.
    """
    files = find(path, SUFFIXES, "token")
    heads = read_heads(files, _HEAD)
    kinds = {head.startswith(_NPY_MAGIC) for head in heads}
    if len(kinds) > 1:
        raise DataError(f"{path} mixes files with and without a .npy header; give a pattern that names one kind")
    npy = kinds.pop()
    raw = None if npy else _stated(files, dtype)
    sibling = neighbors(files)
    headers = [
        _npy(file, head, dtype) if raw is None else _raw(file, head, raw, sibling)
        for file, head in zip(files, heads, strict=True)
    ]
    same = same_dtype([(file.where, header.dtype) for file, header in zip(files, headers, strict=True)])
    shards = Shards([Shard(file, header.tokens, header.offset) for file, header in zip(files, headers, strict=True)], same)
    described = Described(format="npy" if npy else "raw", vocab_size=vocab_size)
    identity = f"{eos}" if bos is None else f"bos {bos}"
    return Corpus(path, shards, Delimited(shards, eos, bos), described, identity)


def read_heads(files: Sequence[File], size: int) -> list[bytes]:
    """The first bytes of every file."""
    return read_each(lambda file: read_bytes(file, 0, size), files)


def _npy(file: File, head: bytes, stated: str | None) -> Header:
    content = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(content)
        wide = version > (1, 0)
        length = int.from_bytes(head[8 : 12 if wide else 10], "little")
        offset = (12 if wide else 10) + length
        if offset > len(head):
            content = io.BytesIO(read_bytes(file, 0, offset))
            np.lib.format.read_magic(content)
        read = np.lib.format.read_array_header_2_0 if wide else np.lib.format.read_array_header_1_0
        shape, _, dtype = read(content)
    except ValueError as error:
        raise DataError(f"{file.where} is a damaged .npy file: {error}; restore the file") from error
    if len(shape) != 1:
        raise DataError(f"{file.where}: token ids must be a 1-D array of integers, found an array of shape {shape}")
    integers(file.where, dtype)
    if stated is not None and dtype != np.dtype(stated):
        raise DataError(f"{file.where}: its header says {dtype}, the recipe dtype = {stated!r}; remove `dtype`")
    wanted = offset + shape[0] * dtype.itemsize
    if file.size != wanted:
        what = "truncated" if file.size < wanted else "too long"
        raise DataError(f"{file.where} is {what}: it ends at byte {file.size}, its header says {wanted}; restore the file")
    if not shape[0]:
        raise DataError(f"{file.where} has no tokens; remove it")
    return Header(offset, shape[0], dtype)


def _stated(files: Sequence[File], stated: str | None) -> np.dtype:
    if stated is None:
        raise DataError(f"{files[0].where} has no header, so its dtype is unknown; set it, for example dtype = 'uint16'")
    return np.dtype(stated).newbyteorder("<")


def _raw(file: File, head: bytes, dtype: np.dtype, sibling: Callable[[str], File | None]) -> Header:
    if not file.size:
        raise DataError(f"{file.where} is empty; remove it")
    if what := foreign_content(file, head, dtype.itemsize, sibling):
        raise DataError(f"{file.where} {what}")
    if file.size % dtype.itemsize:
        cut = file.size - file.size % dtype.itemsize
        raise DataError(
            f"{file.where} has {file.size} bytes, not a multiple of {dtype.itemsize} ({dtype.name}): "
            f"truncated after byte {cut}, or of another dtype"
        )
    return Header(0, file.size // dtype.itemsize, dtype)
