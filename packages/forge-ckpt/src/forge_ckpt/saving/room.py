"""Whether what a run will save has room where it saves, asked before it trains. Nothing is copied and nothing written."""

import json
import resource
from collections.abc import Iterable

from forge_ckpt.format.names import committed
from forge_ckpt.ranks.collective import from_rank_0
from forge_ckpt.saving.saver import draft_of
from forge_core.errors import CheckpointError
from forge_core.protocols.checkpoint import Piece, Store, World
from forge_core.terminal import size


def check_room(store: Store, pieces: Iterable[Piece], world: World, keep: int) -> str:
    """Collective: says what will be missing, on every rank; empty where nothing will, or where the store cannot tell.

    Args:
        pieces: of this rank, as they will be saved.
        keep: how many checkpoints there will be at most, but for the one that is being written. Those that are there already have
            their room.

    Raises:
        CheckpointError: on every rank, when not even one checkpoint has room, or a rank may not write a file as large as its own.
    """
    draft = draft_of(pieces, store)
    mine = {"bytes": draft.table.bytes, "frozen": draft.table.frozen_bytes, "limit": _largest_file(), "error": draft.error}
    ranks = [json.loads(reply) for reply in world.all_gather(json.dumps(mine).encode())]
    if failed := [f"rank {rank}: {found['error']}" for rank, found in enumerate(ranks) if found["error"]]:
        raise CheckpointError(f"the state cannot be saved: {failed[0]}")
    free, there = from_rank_0(world, lambda: (store.free(), len(committed(store.list()))))
    if free is None:
        return ""
    one, place = sum(found["bytes"] for found in ranks), getattr(store, "root", "the store")
    for rank, found in enumerate(ranks):
        if found["limit"] is not None and found["limit"] < found["bytes"]:
            raise CheckpointError(
                f"rank {rank} writes a file of {size(found['bytes'])} for each checkpoint, but may write {size(found['limit'])}: "
                "raise the limit (ulimit -f)"
            )
    if free < one:
        raise CheckpointError(
            f"one checkpoint takes {size(one)}, but {place} has {size(free)} left: free some, or choose another disk by --job.dir"
        )
    more, frozen = max(1, keep + 1 - there), sum(found["frozen"] for found in ranks)
    needed = more * (one - frozen) + frozen
    if free >= needed:
        return ""
    once = f", {size(frozen)} of it stored once" if frozen else ""
    return (
        f"{place} has {size(free)} left, and checkpoints will take up to {size(needed)} more: {more} of {size(one)}{once}, one "
        "of them while it is written. Free some, or keep fewer (checkpoint.keep): a save that finds no room is left out"
    )


def _largest_file() -> int | None:
    """Bytes that a file of this process may have; None without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if limit == resource.RLIM_INFINITY else limit
