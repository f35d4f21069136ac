"""Removes old checkpoints, but only those that are older than one that stays and was read back and verified.

A checkpoint is renamed to a tombstone before its files are removed, so a half-removed one is never loadable.
"""

import logging
import math
from collections.abc import Callable, Collection

from forge_ckpt.errors import Damaged
from forge_ckpt.format.codec import decode, meta_of
from forge_ckpt.format.names import REMOVED, SAVING, Committed, committed, free_name
from forge_ckpt.ranks.collective import from_rank_0
from forge_ckpt.store.policy import RetentionDecision, RetentionPolicy, judge
from forge_ckpt.store.verify import agreed_fault, manifest_bytes, open_manifest
from forge_core.errors import CheckpointError
from forge_core.protocols.checkpoint import Store, World

SECONDS = "seconds"
"""Key of a checkpoint's `meta`: seconds of training behind it, those before a resume included, as the job that saved it measured
them."""

_log = logging.getLogger(__name__)


def retain(
    store: Store,
    world: World,
    keep: int | RetentionPolicy,
    spare: Collection[int] = (),
    may: Callable[[], None] | None = None,
) -> list[str]:
    """Collective: removes the checkpoints that no rule keeps. Returns the names removed, on every rank.

    Of one step only the generation saved last counts. What is removed is older than one that stays and is verified, byte by byte,
    in this call; so the newest good checkpoint never goes, however many newer ones are damaged.

    Args:
        keep: how many of the newest steps stay, 0 for all; or rules.
        spare: steps that stay in any case.
        may: called on rank 0 before each removal; raises when this job may not remove.

    Raises:
        CheckpointError: on every rank, when rank 0 could not look or remove.
    """
    policy = keep if isinstance(keep, RetentionPolicy) else RetentionPolicy(last=keep)

    def look() -> list[tuple[str, bool]]:
        return [(verdict.entry.name, bool(verdict.kept_by)) for verdict in judged(store, policy, spare)]

    plan = from_rank_0(world, look)
    if all(stays for _, stays in plan):
        return []
    verified = next((at for at, (name, stays) in enumerate(plan) if stays and _is_good(store, world, name)), len(plan))
    doomed = [name for name, stays in plan[verified:] if not stays]

    def remove() -> list[str]:
        for name in doomed:
            if may is not None:
                may()
            bury(store, name)
        return doomed

    return from_rank_0(world, remove) if doomed else []


def judged(store: Store, policy: RetentionPolicy, spare: Collection[int] = ()) -> list[RetentionDecision]:
    """What the rules say of each checkpoint of a store, newest first. Rank 0 only.

    Raises:
        CheckpointError, OSError: a manifest that a rule needs cannot be read now.
    """
    entries = committed(store.list())
    seconds = {entry.name: at for entry in entries if (at := _seconds(store, entry)) is not None} if policy.hours else {}
    return judge(entries, policy, seconds, spare)


def _seconds(store: Store, entry: Committed) -> float | None:
    """Seconds of training that a checkpoint records; None where it does not, or is damaged."""
    try:
        found = meta_of(manifest_bytes(store, entry.name)).get(SECONDS)
    except Damaged:
        return None
    return float(found) if isinstance(found, int | float) and found is not True and 0 <= found < math.inf else None


def _is_good(store: Store, world: World, name: str) -> bool:
    """Collective: whether a checkpoint is verified, the same answer on every rank."""
    data = b""
    if world.rank == 0:
        try:
            data = open_manifest(store, name)[1]
        except (CheckpointError, OSError) as cause:
            _log.warning("%s failed verification, so no older checkpoint is removed for it: %s", name, cause)
    data = world.broadcast(data if world.rank == 0 else None)
    if not data:
        return False
    try:
        fault = agreed_fault(store, name, decode(data), world)
    except CheckpointError as cause:
        fault = str(cause)
    if fault and world.rank == 0:
        _log.warning("%s failed verification, so no older checkpoint is removed for it: %s", name, fault)
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
