"""Retention of checkpoints: rules decide which checkpoints are kept, and `retain` removes the others.

The rules use steps, and the training time that a job records in each checkpoint. They do not use file times or clocks of nodes,
which differ between nodes and change when files are copied.

A rule that keeps the first checkpoint of a window keeps it forever, because later ones are not the first. So the result does not
depend on whether old checkpoints are removed one by one, after each save, or all at once.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from forge_ckpt.checkpoint.verification import agreed_fault, manifest_bytes, open_manifest
from forge_ckpt.format.codec import decode, meta_of
from forge_ckpt.format.names import REMOVED, SAVING, Committed, committed, free_name
from forge_ckpt.world import from_rank_0
from forge_core.errors import CheckpointError, Damaged
from forge_core.protocols.checkpoint import Store, World

_HOUR = 3600.0


@dataclass(frozen=True)
class RetentionPolicy:
    """Rules of retention: a checkpoint is kept if any rule keeps it.

    Attributes:
        last: keeps this number of newest steps; 0 keeps all.
        every: keeps steps that are multiples of it; 0 disables the rule.
        log_spaced: `start`; keeps the first checkpoint at or after `start`, `start + 1`, `start + 2`, `start + 4`, ...; None
            disables the rule. After n steps it keeps at most 2 + log2(n) checkpoints. For each step s after `start` that was
            ever saved, it keeps a checkpoint with `start + (s - start) / 2 < kept <= s`.
        hours: keeps the first checkpoint of each window of this many hours of training; 0 disables the rule. It ignores
            checkpoints that do not record the training time.
    """

    last: int = 0
    every: int = 0
    log_spaced: int | None = None
    hours: float = 0.0

    def __post_init__(self) -> None:
        if self.last < 0 or self.every < 0 or (self.log_spaced or 0) < 0 or not 0 <= self.hours < math.inf:
            raise ValueError(f"{self}: rules of retention must not be negative")


class RetentionDecision(NamedTuple):
    """One checkpoint and the rules that keep it, in words. If no rule keeps it, `why` is the reason for its removal."""

    entry: Committed
    kept_by: tuple[str, ...]
    why: str = "no rule keeps it"


def judge(
    entries: Sequence[Committed],
    policy: RetentionPolicy,
    seconds: Mapping[str, float] | None = None,
    spare: Collection[int] = (),
) -> list[RetentionDecision]:
    """Returns the decision on each checkpoint, newest first.

    Args:
        entries: result of `names.committed`, newest first; of each step, only the generation that was saved last is kept.
        seconds: training time of each checkpoint, by name.
        spare: steps that are always kept; a mapping has the reasons.
    """
    newest: dict[int, Committed] = {}
    for entry in entries:
        newest.setdefault(entry.step, entry)
    current = list(newest.values())
    reasons: dict[Committed, list[str]] = {entry: [] for entry in current}
    for entry in current if not policy.last else current[: policy.last]:
        reasons[entry].append(f"last {policy.last}" if policy.last else "all are kept")
    if policy.every:
        for entry in current:
            if entry.step % policy.every == 0:
                reasons[entry].append(f"every {policy.every} steps")
    if policy.log_spaced is not None:
        start = policy.log_spaced
        for distance, entry in _firsts(current, lambda entry: _octave(entry.step - start)).items():
            reasons[entry].append(f"first from step {start + distance}")
    if policy.hours:
        known = seconds or {}
        for window, entry in _firsts(current, lambda entry: _window(known.get(entry.name), policy.hours)).items():
            reasons[entry].append(f"first after {window * policy.hours:g} h of training")
    for entry in current:
        if entry.step in spare:
            reasons[entry].append(spare[entry.step] if isinstance(spare, Mapping) else "spared")
    return [
        RetentionDecision(entry, tuple(reasons[entry]))
        if entry in reasons
        else RetentionDecision(entry, (), f"replaced by {newest[entry.step].name}")
        for entry in entries
    ]


def _firsts(current: Iterable[Committed], window: Callable[[Committed], int | None]) -> dict[int, Committed]:
    """Returns the oldest checkpoint of each window; skips checkpoints without a window."""
    firsts: dict[int, Committed] = {}
    for entry in sorted(current):
        at = window(entry)
        if at is not None:
            firsts.setdefault(at, entry)
    return firsts


def _octave(distance: int) -> int | None:
    """Returns the start of the window of a distance: 0, or the largest power of two up to the distance."""
    return None if distance < 0 else 1 << (distance.bit_length() - 1) if distance else 0


def _window(seconds: float | None, hours: float) -> int | None:
    return None if seconds is None else math.floor(seconds / (hours * _HOUR))


SECONDS = "seconds"
"""Key of a checkpoint's `meta` for its training time in seconds, including the time before resumes."""

_log = logging.getLogger(__name__)


def retain(
    store: Store,
    world: World,
    keep: int | RetentionPolicy,
    spare: Collection[int] = (),
    may: Callable[[], None] | None = None,
) -> list[str]:
    """Collective: removes the checkpoints that no rule keeps. Returns the removed names on every rank.

    Of each step, only the generation that was saved last is kept. A checkpoint is removed only if this call has verified every
    byte of a newer one that is kept. So the newest good checkpoint is never removed, however many newer ones are damaged.

    Args:
        keep: number of newest steps to keep, 0 for all; or rules.
        spare: steps that are always kept.
        may: called on rank 0 before each removal; raises an error if this job may not remove checkpoints.

    Raises:
        CheckpointError: on every rank, if rank 0 could not list or remove checkpoints.
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
    """Returns the decisions on all checkpoints of a store, newest first. Call it on rank 0 only.

    Raises:
        CheckpointError, OSError: a manifest that a rule needs cannot be read.
    """
    entries = committed(store.list())
    seconds = {entry.name: at for entry in entries if (at := _seconds(store, entry)) is not None} if policy.hours else {}
    return judge(entries, policy, seconds, spare)


def _seconds(store: Store, entry: Committed) -> float | None:
    """Returns the training time that a checkpoint records, in seconds; None if it does not, or is damaged."""
    try:
        seconds = meta_of(manifest_bytes(store, entry.name)).get(SECONDS)
    except Damaged:
        return None
    return float(seconds) if isinstance(seconds, int | float) and seconds is not True and 0 <= seconds < math.inf else None


def _is_good(store: Store, world: World, name: str) -> bool:
    """Collective: whether a checkpoint passes verification; the same result on every rank."""
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
    """Renames a directory so that it cannot be loaded, then removes it."""
    tombstone = free_name(f"{REMOVED}{name}", store.list())
    store.rename(name, tombstone)
    store.remove(tombstone)


def sweep(store: Store) -> None:
    """Removes the leftovers of interrupted saves and removals. Call it on rank 0 only, while no save is in progress."""
    for name in store.list():
        if name.startswith((SAVING, REMOVED)):
            store.remove(name)
