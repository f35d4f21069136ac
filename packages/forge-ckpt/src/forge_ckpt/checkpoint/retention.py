"""Which checkpoints stay: each rule keeps some, and what no rule keeps may go. Nothing here looks at a store.

Rules go by steps, and by the time of training that a job wrote into a checkpoint when it saved it. The times of files and the
clocks of nodes say nothing: they differ, and a copy changes them.

A rule that keeps the first checkpoint of a window keeps it for ever: later ones are not the first. So it makes no difference
whether old checkpoints go one at a time, as a run saves, or all at once.
"""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from forge_ckpt.checkpoint.verification import agreed_fault, manifest_bytes, open_manifest
from forge_ckpt.errors import Damaged
from forge_ckpt.format.codec import decode, meta_of
from forge_ckpt.format.names import REMOVED, SAVING, Committed, committed, free_name
from forge_ckpt.world import from_rank_0
from forge_core.errors import CheckpointError
from forge_core.protocols.checkpoint import Store, World

_HOUR = 3600.0


@dataclass(frozen=True)
class RetentionPolicy:
    """Rules that add up: a checkpoint stays if any of them keeps it.

    Attributes:
        last: as many of the newest steps; 0 keeps all.
        every: steps that are multiples of it; 0 for none.
        log_spaced: the first checkpoint at or after `start`, `start + 1`, `start + 2`, `start + 4`, ...; None for none. After n
            steps these are at most 2 + log2(n). For each step s after `start` that was ever saved one stays that is not later and
            has come more than half as far: `start + (s - start) / 2 < kept <= s`.
        hours: the first checkpoint of each window of so many hours of training; 0 for none. It keeps none of those that do not
            say how long training had taken.
    """

    last: int = 0
    every: int = 0
    log_spaced: int | None = None
    hours: float = 0.0

    def __post_init__(self) -> None:
        if self.last < 0 or self.every < 0 or (self.log_spaced or 0) < 0 or not 0 <= self.hours < math.inf:
            raise ValueError(f"{self}: rules of retention are not negative")


class RetentionDecision(NamedTuple):
    """One checkpoint and the rules that keep it, in words; without one it may go, as `why` says."""

    entry: Committed
    kept_by: tuple[str, ...]
    why: str = "no rule keeps it"


def judge(
    entries: Sequence[Committed],
    policy: RetentionPolicy,
    seconds: Mapping[str, float] | None = None,
    spare: Collection[int] = (),
) -> list[RetentionDecision]:
    """A verdict on each checkpoint, newest first.

    Args:
        entries: as `names.committed` gives them, newest first; of one step only the generation saved last counts.
        seconds: of training behind a checkpoint, by its name.
        spare: steps that stay in any case; a mapping says why.
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
    """The oldest checkpoint of each window; those without one are left out."""
    found: dict[int, Committed] = {}
    for entry in sorted(current):
        at = window(entry)
        if at is not None:
            found.setdefault(at, entry)
    return found


def _octave(distance: int) -> int | None:
    """Where the window of a distance begins: 0, or the largest power of two that is not above it."""
    return None if distance < 0 else 1 << (distance.bit_length() - 1) if distance else 0


def _window(seconds: float | None, hours: float) -> int | None:
    return None if seconds is None else math.floor(seconds / (hours * _HOUR))


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
