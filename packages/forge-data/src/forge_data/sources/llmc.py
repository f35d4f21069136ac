"""Token files of llm.c: 256 int32 (magic, version, number of tokens, zeros), then uint16 or uint32 ids.

Writers put the end-of-text token *before* each document and begin a new file at any token, so a document may continue in
the next file.
"""

import struct

import numpy as np

from forge_core.errors import DataError
from forge_data.sources.arrays import read_heads
from forge_data.sources.token_files import TokenFiles, TokenFilesInfo, same_dtype
from forge_data.storage.document_ends import Delimited
from forge_data.storage.files import File, find
from forge_data.storage.shards import Shard, Shards

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
