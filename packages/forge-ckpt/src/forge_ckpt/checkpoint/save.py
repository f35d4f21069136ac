"""Builds a draft of a checkpoint from live tensors, saves it while training waits, and checks the free space."""

import json
import resource
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from forge_ckpt.checkpoint.retention import RetentionPolicy
from forge_ckpt.checkpoint.write import Draft, SaveRequest, write
from forge_ckpt.format.manifest import TensorInfo, check_tensor
from forge_ckpt.format.names import committed
from forge_ckpt.format.rank_files import RankTable
from forge_ckpt.format.tensor_bytes import dtype_name, file_of
from forge_ckpt.world import describe_error, from_rank_0
from forge_core.errors import CheckpointError
from forge_core.protocols.checkpoint import LinkingStore, Piece, Store, World
from forge_core.terminal import size


def check_room(store: Store, pieces: Iterable[Piece], world: World, keep: int) -> str:
    """Collective: returns a warning on every rank if later checkpoints will lack space; empty if not, or if the free space is
    unknown.

    Args:
        pieces: pieces of this rank, as they will be saved.
        keep: maximum number of checkpoints, besides the one that is being written. Existing checkpoints need no further space.

    Raises:
        CheckpointError: on every rank, if there is no space for one checkpoint, or the file of a rank exceeds its size limit.
    """
    draft = draft_of(pieces, store)
    own = {"bytes": draft.table.bytes, "frozen": draft.table.frozen_bytes, "limit": _largest_file(), "error": draft.error}
    ranks = [json.loads(reply) for reply in world.all_gather(json.dumps(own).encode())]
    if failed := [f"rank {rank}: {needs['error']}" for rank, needs in enumerate(ranks) if needs["error"]]:
        raise CheckpointError(f"the state cannot be saved: {failed[0]}")
    free, existing = from_rank_0(world, lambda: (store.free(), len(committed(store.list()))))
    if free is None:
        return ""
    one, place = sum(needs["bytes"] for needs in ranks), getattr(store, "root", "the store")
    for rank, needs in enumerate(ranks):
        if needs["limit"] is not None and needs["limit"] < needs["bytes"]:
            raise CheckpointError(
                f"rank {rank} writes a file of {size(needs['bytes'])} for each checkpoint, but may write {size(needs['limit'])}: "
                "raise the limit (ulimit -f)"
            )
    if free < one:
        raise CheckpointError(
            f"one checkpoint takes {size(one)}, but {place} has {size(free)} left: free some, or choose another disk by --job.dir"
        )
    more, frozen = max(1, keep + 1 - existing), sum(needs["frozen"] for needs in ranks)
    needed = more * (one - frozen) + frozen
    if free >= needed:
        return ""
    once = f", {size(frozen)} of it stored once" if frozen else ""
    return (
        f"{place} has {size(free)} left, and checkpoints will take up to {size(needed)} more: {more} of {size(one)}{once}, one "
        "of them while it is written. Free some, or keep fewer (checkpoint.keep): a save that finds no room is left out"
    )


def _largest_file() -> int | None:
    """Returns the maximum size of a file of this process in bytes; None without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


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
        pieces: this rank's boxes. The owned ones are written; all of them define the tensors that the checkpoint must contain.
        meta, step, keep, spare, marks: see `write.SaveRequest`; those of rank 0 are used.
        may: see `write.write`.

    Raises:
        CheckpointError: the save failed; the message is equal on all ranks and names the first cause. Nothing was committed,
            earlier checkpoints are intact, and the new files were removed.
    """
    return write(store, draft_of(pieces, store), SaveRequest(step, meta, keep, spare, marks), world, may)


def draft_of(pieces: Iterable[Piece], store: Store) -> Draft:
    """Returns this rank's draft, whose files read the live tensors. If the pieces are invalid, the draft has an `error`."""
    try:
        table, written = table_of(list(pieces), apart=isinstance(store, LinkingStore))
    except Exception as cause:  # noqa: BLE001 (the caller's pieces may raise anything; every rank must learn of it)
        empty = np.zeros((0, 1), dtype=np.int64)
        return Draft(RankTable((), empty[:, 0], empty, empty), error=describe_error(cause))
    moving = len(written) - table.frozen
    file, frozen = (file_of(part) if part else None for part in (written[:moving], written[moving:]))
    return Draft(table, file, frozen)


def table_of(pieces: Sequence[Piece], apart: bool = False) -> tuple[RankTable, list[Piece]]:
    """Returns the table of a rank, without checksums, and the pieces that it writes; with `apart`, frozen pieces come last, for
    a second file.

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
