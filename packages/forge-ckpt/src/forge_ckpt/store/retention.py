"""Removes old checkpoints, but only after a newer one was read back and verified.

A checkpoint is renamed to a tombstone before its files are removed, so a half-removed one is never loadable.
"""

import logging
from collections.abc import Collection

from forge_ckpt.format.codec import decode
from forge_ckpt.format.names import REMOVED, SAVING, committed, free_name
from forge_ckpt.ranks.collective import from_rank_0
from forge_ckpt.store.verify import agreed_fault, open_manifest
from forge_core.errors import CheckpointError
from forge_core.protocols.ckpt import Store, World

_log = logging.getLogger(__name__)


def retain(store: Store, world: World, keep: int, spare: Collection[int] = ()) -> list[str]:
    """Collective: removes all but the `keep` newest checkpoints. Returns the names removed, on every rank.

    Of one step only the generation saved last counts. Nothing is removed unless at least one of those that stay is
    verified, byte by byte, in this call. `keep` of 0 keeps every step and only drops replaced generations; steps in `spare` stay
    in any case.

    Raises:
        CheckpointError: on every rank, when rank 0 could not look or remove.
    """
    plan = from_rank_0(world, lambda: _plan(store, keep, spare))
    if not plan["doomed"] or not any(_is_good(store, world, name) for name in plan["kept"]):
        return []

    def remove() -> list[str]:
        for name in plan["doomed"]:
            bury(store, name)
        return plan["doomed"]

    return from_rank_0(world, remove)


def _plan(store: Store, keep: int, spare: Collection[int]) -> dict[str, list[str]]:
    entries = committed(store.list())
    current = [entry for index, entry in enumerate(entries) if index == 0 or entries[index - 1].step != entry.step]
    kept = [entry for index, entry in enumerate(current) if not keep or index < keep or entry.step in spare]
    return {"kept": [entry.name for entry in kept], "doomed": [entry.name for entry in entries if entry not in kept]}


def _is_good(store: Store, world: World, name: str) -> bool:
    """Collective: whether a checkpoint is verified, the same answer on every rank."""
    data = b""
    if world.rank == 0:
        try:
            data = open_manifest(store, name)[1]
        except (CheckpointError, OSError) as cause:
            _log.warning("%s failed verification, so no older checkpoint is removed: %s", name, cause)
    data = world.broadcast(data if world.rank == 0 else None)
    if not data:
        return False
    try:
        fault = agreed_fault(store, name, decode(data), world)
    except CheckpointError as cause:
        fault = str(cause)
    if fault and world.rank == 0:
        _log.warning("%s failed verification, so no older checkpoint is removed: %s", name, fault)
    return fault is None


def bury(store: Store, name: str) -> None:
    """Makes a directory unloadable, then removes it."""
    tombstone = free_name(f"{REMOVED}{name}", store.list())
    store.rename(name, tombstone)
    store.remove(tombstone)


def sweep(store: Store) -> None:
    """Removes what interrupted saves and removals left; rank 0 only, with no save under way."""
    for name in store.list():
        if name.startswith((SAVING, REMOVED)):
            store.remove(name)
