"""Synchronous saves: from live tensors to a checkpoint, while the caller waits."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from forge_ckpt.format.manifest import TensorInfo, check_tensor
from forge_ckpt.format.table import RankTable
from forge_ckpt.format.tensor_files import dtype_name, file_of
from forge_ckpt.ranks.collective import describe_error
from forge_ckpt.saving.write import Draft, SaveRequest, write
from forge_ckpt.store.policy import RetentionPolicy
from forge_core.errors import CheckpointError
from forge_core.protocols.checkpoint import LinkingStore, Piece, Store, World


def save(
    store: Store,
    pieces: Iterable[Piece],
    meta: Mapping[str, Any],
    step: int,
    world: World,
    *,
    keep: int | RetentionPolicy = 0,
    spare: Collection[int] = (),
    marks: Mapping[str, int] = MappingProxyType({}),
    may: Callable[[], None] | None = None,
) -> str:
    """Collective: writes a checkpoint. Returns its directory name on every rank when it is durable.

    Args:
        pieces: this rank's boxes; those it owns are written, all of them say which tensors there must be.
        meta, step, keep, spare, marks: see `write.Order`; rank 0's counts.
        may: see `write.write`.

    Raises:
        CheckpointError: the same on every rank, naming the first cause. Nothing was committed, earlier checkpoints are
            intact, and what was written is removed.
    """
    return write(store, draft_of(pieces, store), SaveRequest(step, meta, keep, spare, marks), world, may)


def draft_of(pieces: Iterable[Piece], store: Store) -> Draft:
    """What this rank adds to a store; files read the live tensors. What is wrong with them is its error."""
    try:
        table, written = table_of(list(pieces), apart=isinstance(store, LinkingStore))
    except Exception as cause:  # noqa: BLE001 (the caller's pieces may raise anything; every rank must learn of it)
        empty = np.zeros((0, 1), dtype=np.int64)
        return Draft(RankTable((), empty[:, 0], empty, empty), error=describe_error(cause))
    moving = len(written) - table.frozen
    file, frozen = (file_of(part) if part else None for part in (written[:moving], written[moving:]))
    return Draft(table, file, frozen)


def table_of(pieces: Sequence[Piece], apart: bool = False) -> tuple[RankTable, list[Piece]]:
    """The table of a rank before its checksums are known, and the pieces that it writes; with `apart`, frozen ones last, for a
    second file.

    Raises:
        CheckpointError: a piece cannot be stored, or two pieces disagree about a tensor.
    """
    known: dict[str, int] = {}
    tensors: list[TensorInfo] = []
    written: list[Piece] = []
    for piece in pieces:
        shape = tuple(int(size) for size in piece.shape)
        info = TensorInfo(piece.name, dtype_name(piece.local, piece.name), shape)
        try:
            check_tensor(info.name, info.dtype, info.shape)
        except ValueError as cause:
            raise CheckpointError(str(cause)) from cause
        if len(shape) != piece.local.dim() or len(shape) != len(piece.offset):
            raise CheckpointError(f"{piece.name}: shape {shape}, offset {tuple(piece.offset)} and box {tuple(piece.local.shape)}")
        if known.setdefault(info.name, len(tensors)) == len(tensors):
            tensors.append(info)
        elif tensors[known[info.name]] != info:
            raise CheckpointError(f"{info.name}: two pieces disagree: {tensors[known[info.name]]} and {info}")
        if piece.owned and piece.local.numel():
            written.append(piece)
    frozen = sum(piece.frozen for piece in written) if apart else 0
    if frozen:
        written.sort(key=lambda piece: piece.frozen)
    dims = max([1, *(len(info.shape) for info in tensors)])
    offset = np.zeros((len(written), dims), dtype=np.int64)
    extent = np.ones((len(written), dims), dtype=np.int64)
    for row, piece in enumerate(written):
        offset[row, : len(piece.shape)] = [int(low) for low in piece.offset]
        extent[row, : len(piece.shape)] = piece.local.shape
    tensor = np.array([known[piece.name] for piece in written], dtype=np.int64)
    return RankTable(tuple(tensors), tensor, offset, extent, frozen=frozen), written
