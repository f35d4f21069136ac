"""Token files of datatrove: `NAME.ds` holds raw ids, `NAME.ds.index` the uint64 document ends, counted in tokens.

The last end is the number of tokens, so the bytes per id follow from file size and index. `NAME.ds.metadata` holds the
tokenizer's name and the same number. A loss mask (`NAME.ds.loss`, one byte per token) is not applied, so a file that has
one is refused unless `ignore_loss_mask` is set.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import xxhash

from forge_core.errors import DataError
from forge_core.lines import lines_of
from forge_data.sources.token_files import TokenFiles, TokenFilesInfo, same_dtype
from forge_data.storage.document_ends import Ends, Listed
from forge_data.storage.files import File, find, neighbors, read_bytes
from forge_data.storage.shards import Shard, Shards, map_file

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
