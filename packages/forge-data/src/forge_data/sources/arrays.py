"""Files that hold only token ids: `.npy`, or raw integers of a stated dtype. The dtype is never guessed.

Any file can be read as raw integers, so files of other formats are recognized by their first bytes. These files do not
record where documents end.
"""

import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple, Self

import numpy as np

from forge_core.errors import DataError
from forge_core.files import publish, sync
from forge_data.sources.store import FORMAT, MANIFEST
from forge_data.sources.token_files import TokenFiles, TokenFilesInfo, integers, read_heads, same_dtype
from forge_data.storage import npy
from forge_data.storage.files import File, find, neighbors, read_bytes
from forge_data.storage.shards import Delimited, Shard, Shards
from forge_data.storage.workspace import Partial

SUFFIXES = (".npy", ".bin")
_UNPACK = "unpack it, because token files are memory-mapped"
_CONTAINERS = (
    (b"\x28\xb5\x2f\xfd", f"is compressed with zstandard; {_UNPACK}"),
    (b"BZh91AY&SY", f"is compressed with bzip2; {_UNPACK}"),
    (b"\xfd7zXZ\x00", f"is compressed with xz; {_UNPACK}"),
    (b"PAR1", "is a Parquet file; use source 'parquet' with `ids`"),
    (b"ARROW1\x00\x00", "is an Arrow file; use source 'arrow' with `ids`"),
    (b"GGUF", "is a GGUF file of weights, not of token ids"),
    (b"\x89HDF\r\n\x1a\n", "is an HDF5 file; write its ids with np.save, and use source 'tokens'"),
    (b"MMIDIDX\x00\x00", "is an index of Megatron; use source 'megatron'"),
)
_LLMC = {20240520, 20240801, 20240522}
"""Magic numbers of llm.c: GPT-2 tokens, Llama 3 tokens, multiple-choice examples."""
_PRINTABLE = frozenset(b"\t\n\r") | frozenset(range(32, 127))
_PRINTABLE_BYTES = 64
"""A file is text if this many of its first bytes are all printable."""


class TokenFileHeader(NamedTuple):
    """Byte offset of a file's first token, number of tokens, and their dtype."""

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
) -> TokenFiles:
    """Opens a file, the files of a directory, or the files that match a pattern.

    Args:
        path: a file, directory, pattern or URL.
        dtype: dtype of raw files, required for them; a `.npy` file states its dtype in the header.
        eos: id of the token that ends a document.
        bos: id of the token that begins a document; excludes `eos`.
        vocab_size: vocabulary size of the tokenizer that wrote the files, if known.

    Raises:
        DataError: a file is missing, empty, truncated or of another format; the files have different dtypes; or the dtype
            is unknown.
    """
    files = find(path, SUFFIXES, "token")
    heads = read_heads(files, npy.HEAD)
    kinds = {head.startswith(npy.MAGIC) for head in heads}
    if len(kinds) > 1:
        raise DataError(f"{path} mixes files with and without a .npy header; use a pattern that matches only one kind")
    with_header = kinds.pop()
    raw = None if with_header else _stated_dtype(files, dtype)
    sibling = neighbors(files)
    headers = [
        _npy_header(file, head, dtype) if raw is None else _raw_header(file, head, raw, sibling)
        for file, head in zip(files, heads, strict=True)
    ]
    same = same_dtype([(file.where, header.dtype) for file, header in zip(files, headers, strict=True)])
    shards = Shards([Shard(file, header.tokens, header.offset) for file, header in zip(files, headers, strict=True)], same)
    described = TokenFilesInfo(format="npy" if with_header else "raw", vocab_size=vocab_size)
    identity = f"{eos}" if bos is None else f"bos {bos}"
    return TokenFiles(path, shards, Delimited(shards, eos, bos), described, identity)


def _npy_header(file: File, head: bytes, stated: str | None) -> TokenFileHeader:
    header = npy.read_header(file, head)
    if len(header.shape) != 1:
        raise DataError(f"{file.where}: token ids must be a 1-D array of integers, found an array of shape {header.shape}")
    dtype = integers(file.where, header.dtype)
    if stated is not None and dtype != np.dtype(stated):
        raise DataError(f"{file.where}: the header says {dtype}, but the recipe sets dtype = {stated!r}; remove `dtype`")
    npy.refuse_other_size(file, header)
    if not header.shape[0]:
        raise DataError(f"{file.where} has no tokens; remove it")
    return TokenFileHeader(header.offset, header.shape[0], dtype)


def _stated_dtype(files: Sequence[File], stated: str | None) -> np.dtype:
    if stated is None:
        raise DataError(f"{files[0].where} has no header, so its dtype is unknown; set it, for example dtype = 'uint16'")
    return np.dtype(stated).newbyteorder("<")


def _raw_header(file: File, head: bytes, dtype: np.dtype, sibling: Callable[[str], File | None]) -> TokenFileHeader:
    if not file.size:
        raise DataError(f"{file.where} is empty; remove it")
    if what := foreign_content(file, head, dtype.itemsize, sibling):
        raise DataError(f"{file.where} {what}")
    if file.size % dtype.itemsize:
        cut = file.size - file.size % dtype.itemsize
        raise DataError(
            f"{file.where} has {file.size} bytes, not a multiple of {dtype.itemsize} ({dtype.name}): "
            f"it was truncated after byte {cut}, or its dtype is a different one"
        )
    return TokenFileHeader(0, file.size // dtype.itemsize, dtype)


class ArrayWriter:
    """Writes a file of token ids. Use it as a context manager; without `commit`, the file is removed on exit.

    Only the last token separates documents in such a file. So all documents must end with the same token, and this token
    must not occur elsewhere, unless `lose_documents` is set.
    """

    def __init__(self, path: Path, dtype: str, *, header: bool, lose_documents: bool) -> None:
        """Creates the unfinished file; `path` must not exist.

        Raises:
            DataError: `path` exists, or its directory is not writable.
        """
        self.path = path
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.header = header
        self.lose_documents = lose_documents
        self.eos: int | None = None
        self._tokens = 0
        if path.exists():
            raise DataError(f"{path} exists; choose another path or remove it")
        try:
            self._owned = Partial(path, directory=False)
            self._partial = self._owned.path
            self._file = self._partial.open("wb")
        except OSError as error:
            raise DataError(f"{path.parent} cannot be written: {error.strerror}; choose another directory") from error
        self._head(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        self._owned.close()

    def add(self, ids: np.ndarray, ends: np.ndarray) -> None:
        """Appends whole documents; see `StoreWriter.add`.

        Raises:
            DataError: an id does not fit the dtype, document borders would be lost, or the disk is full.
        """
        if not len(ids):
            return
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high > np.iinfo(self.dtype).max:
            raise DataError(f"token id {low if low < 0 else high} does not fit {self.dtype.name}; choose a larger dtype")
        if not self.lose_documents:
            self._refuse_lost(ids, ends)
        try:
            self._file.write(ids.astype(self.dtype, copy=False).tobytes())
        except OSError as error:
            raise DataError(f"{self._partial} cannot be written: {error.strerror}") from error
        self._tokens += len(ids)

    def commit(self) -> int | None:
        """Finishes the file, renames it to `path`, and returns the token that ends documents, if there is one.

        Raises:
            DataError: no document was added, or the disk is full.
        """
        if not self._tokens:
            raise DataError(f"{self.path} has no documents; nothing to write")
        try:
            self._file.seek(0)
            self._head(self._tokens)
            sync(self._file)
            self._file.close()
            publish(self._partial, self.path)
        except OSError as error:
            raise DataError(f"{self.path} cannot be written: {error.strerror}") from error
        return self.eos

    def _head(self, tokens: int) -> None:
        """Writes the header. numpy pads it, so its length does not depend on the number of tokens."""
        if self.header:
            described = {"descr": self.dtype.str, "fortran_order": False, "shape": (tokens,)}
            file: IO[bytes] = self._file
            np.lib.format.write_array_header_1_0(file, described)

    def _refuse_lost(self, ids: np.ndarray, ends: np.ndarray) -> None:
        last = ids[np.asarray(ends, dtype=np.int64) - 1]
        self.eos = int(last[0]) if self.eos is None else self.eos
        if (last != self.eos).any() or np.count_nonzero(ids == self.eos) != len(ends):
            raise DataError(
                f"{self.path.name} cannot record where documents end: they do not all end with one token that occurs nowhere "
                f"else (such as {self.eos}); write a store or Megatron's format, or use --lose-documents"
            )


def foreign_content(file: File, head: bytes, width: int, sibling: Callable[[str], File | None]) -> str | None:
    """Recognizes files that are not raw integers; returns the format and the source that reads it, or None.

    Args:
        file: the file to recognize.
        head: its first few hundred bytes.
        width: bytes per integer; text is not recognized at a width of 1, where any text is valid.
        sibling: finds a file by its path.
    """
    for magic, what in _CONTAINERS:
        if head.startswith(magic):
            return what
    if is_llmc(head):
        return "begins with the header of llm.c; use source 'llmc', which reads its dtype from the header"
    if head.startswith(b"PK\x03\x04"):
        numpy = b".npy" in head[:128]
        return (
            "is a .npz archive of numpy; write its array with np.save, and use source 'tokens'"
            if numpy
            else "is a zip archive; unpack it"
        )
    if _is_gzip(head):
        return f"is compressed with gzip; {_UNPACK}"
    if _is_arrow_stream(head):
        return "is an Arrow stream; use source 'arrow' with `ids`"
    if _is_safetensors(head, file.size):
        return "is a safetensors file of weights, not of token ids"
    if width > 1 and len(head) >= _PRINTABLE_BYTES and _PRINTABLE.issuperset(head):
        return "is text, not token ids; use source 'text' or 'jsonl'"
    return _by_neighbors(file, sibling)


def is_llmc(head: bytes) -> bool:
    """Whether a file begins with a header of llm.c: magic, version, any count, zeros."""
    if len(head) < 12:
        return False
    magic, version = struct.unpack("<ii", head[:8])
    return magic in _LLMC and 0 < version < 16 and not any(head[12:1024])


def _is_gzip(head: bytes) -> bool:
    if not head.startswith(b"\x1f\x8b\x08"):
        return False
    try:
        zlib.decompressobj(31).decompress(head)
    except zlib.error:
        return False
    return True


def _is_arrow_stream(head: bytes) -> bool:
    """Whether a file begins with an Arrow message: its marker, the length of its metadata, and a flatbuffer."""
    if len(head) < 12 or head[:4] != b"\xff\xff\xff\xff":
        return False
    length, root = struct.unpack("<ii", head[4:12])
    return 0 < length < 1 << 24 and length % 8 == 0 and 8 <= root < min(length, 64)


def _is_safetensors(head: bytes, size: int) -> bool:
    """Whether a file begins with the length of a JSON object and the object."""
    return head[8:10] == b'{"' and 2 < int.from_bytes(head[:8], "little") < size


def _by_neighbors(file: File, sibling: Callable[[str], File | None]) -> str | None:
    if file.where.endswith(".bin") and sibling(file.where.removesuffix(".bin") + ".idx"):
        return "has a Megatron index in its directory; use source 'megatron', which reads its dtype and documents"
    if sibling(f"{file.where}.index"):
        return "has a document index of datatrove; use source 'datatrove'"
    folder = file.where.rpartition("/")[0]
    manifest = sibling(f"{folder}/{MANIFEST}" if folder else MANIFEST)
    if manifest is not None and FORMAT.encode() in read_bytes(manifest, 0, 256):
        return f"is a shard of the token store {folder or '.'}; use source 'store', which reads its dtype and documents"
    return None
