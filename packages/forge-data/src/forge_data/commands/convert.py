"""Implements `data convert`: copies tokens and documents of any format to a store, Megatron's files, `.npy` or raw ids."""

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

from forge_core.errors import DataError
from forge_core.protocols.data import Source, Tokenizer
from forge_core.terminal import ProgressMeter
from forge_data.sources.arrays import ArrayWriter
from forge_data.sources.megatron import MegatronWriter
from forge_data.sources.scan import mask_of, portions
from forge_data.sources.store import DTYPES, MaskEntry, StoreSource
from forge_data.sources.store_writer import SHARD_TOKENS, StoreWriter
from forge_data.sources.token_files import TokenFiles
from forge_data.tokenizers.dump import tokenizer_of

TARGETS = ("store", "megatron", "npy", "bin")


class Writer(Protocol):
    """Writes whole documents. A context manager: without `commit`, the output is removed."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    def add(self, ids: np.ndarray, ends: np.ndarray) -> None: ...

    def commit(self) -> object: ...


def convert(
    source: Source,
    out: Path,
    target: str,
    *,
    dtype: str | None = None,
    tokenizer: Tokenizer | None = None,
    lose_documents: bool = False,
    join_sequences: bool = False,
    skip_empty: bool = False,
    shard_tokens: int = SHARD_TOKENS,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """Copies tokens and documents to another format.

    Args:
        source: the opened source.
        out: directory of a store, prefix of Megatron's files, or file.
        target: one of `TARGETS`.
        dtype: dtype of the ids in the target; by default unchanged.
        tokenizer: tokenizer to copy into a store; by default the copy in the source, if the source is a store.
        lose_documents: allows a target that cannot store document borders.
        join_sequences: joins the sequences of each document (Megatron).
        skip_empty: skips and counts documents without tokens, which no target can store.
        shard_tokens: tokens per shard of a store.
        report: called with progress messages.

    Raises:
        DataError: the target cannot store everything and no option allows the loss, or it cannot be written.
    """
    _refuse_lost_sequences(source, join_sequences)
    kind = dtype or source.read(0, 0).dtype.name
    if kind not in DTYPES:
        raise DataError(f"ids cannot be written as {kind!r}; known: {', '.join(DTYPES)}")
    if tokenizer is None and isinstance(source, StoreSource):
        tokenizer = tokenizer_of(source)
    if tokenizer is not None and source.max_id is not None and source.max_id >= tokenizer.vocab_size:
        raise DataError(
            f"{source.name} holds id {source.max_id}, but tokenizer {tokenizer.name} has only {tokenizer.vocab_size} ids"
        )
    mask = source.manifest.mask if isinstance(source, StoreSource) else None
    if mask is not None and target != "store":
        raise DataError(f"{source.name} has a loss mask, which {target} files cannot hold; write a store")
    with _writer(out, target, kind, tokenizer, source.name, lose_documents, shard_tokens, mask) as writer:
        progress = ProgressMeter(f"converting {source.name}", source.tokens, "tokens", report)
        documents = 0
        for start, ids, ends in portions(source):
            if isinstance(writer, StoreWriter):
                writer.add(ids, ends, learned=mask_of(source, start, start + len(ids)) if mask else None)
            else:
                writer.add(ids, ends)
            documents += len(ends)
            progress.advance(len(ids))
        empty = _empty_documents(source, documents, skip_empty)
        result = writer.commit()
    summary: dict[str, Any] = {
        "path": str(out),
        "format": target,
        "dtype": kind,
        "tokens": source.tokens,
        "documents": documents,
    }
    if empty:
        summary["empty_documents_skipped"] = empty
    if target in ("npy", "bin"):
        summary["eos"] = result
    return summary


def _writer(
    out: Path,
    target: str,
    dtype: str,
    tokenizer: Tokenizer | None,
    name: str,
    lose_documents: bool,
    shard_tokens: int,
    mask: MaskEntry | None,
) -> Writer:
    match target:
        case "store":
            return StoreWriter(out, dtype=dtype, tokenizer=tokenizer, source=name, shard_tokens=shard_tokens, mask=mask)
        case "megatron":
            return MegatronWriter(out.with_name(out.name.removesuffix(".idx").removesuffix(".bin")), dtype)
        case "npy" | "bin":
            return ArrayWriter(out, dtype, header=target == "npy", lose_documents=lose_documents)
    raise DataError(f"unknown format {target!r} to write; known: {', '.join(TARGETS)}")


def _refuse_lost_sequences(source: Source, join: bool) -> None:
    if not isinstance(source, TokenFiles):
        return
    described = source.described
    sequences, documents = described.more.get("sequences"), described.documents
    if not join and described.joins is not None and described.joins():
        raise DataError(
            f"{source.name} has {sequences} sequences in {documents} documents, but the target stores only documents; use "
            "--join-sequences to join the sequences of each document"
        )


def _empty_documents(source: Source, documents: int, skip: bool) -> int:
    """Returns the number of documents without tokens, which have no border of their own."""
    stated = source.described.documents if isinstance(source, TokenFiles) else None
    empty = 0 if stated is None else stated - documents
    if empty and not skip:
        raise DataError(
            f"{source.name} has {empty} documents without tokens, which the target cannot store; use --skip-empty to skip them"
        )
    return empty
