"""Names inside a store, and what each means.

step-00000100         a committed checkpoint
step-00000100-g2      the same step saved again: the highest number counts
.saving-*             being written; never loadable, swept by the next save
.removed-*            a tombstone; never loadable, swept by the next save
damaged-*             failed verification; kept for a person to look at
superseded-step-*     a later step of a history that a run left by going back; kept likewise
owner                 the mark of the job that writes here
latest                one line naming the checkpoint committed last; for people and tools, a resume does not trust it
best, ...             marks that a run sets, one line each; retention spares what they name
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

import xxhash

from forge_core.errors import CheckpointError
from forge_core.protocols.checkpoint import Store

MANIFEST = "manifest.json"
LATEST = "latest"
OWNER = "owner"
SAVING = ".saving-"
REMOVED = ".removed-"
DAMAGED = "damaged-"
SUPERSEDED = "superseded-"

_SAFE = re.compile(r"[\w.-]+", re.ASCII)
_STEP = re.compile(r"step-(\d{8,18})(?:-g([1-9]\d{0,8}))?", re.ASCII)


class Committed(NamedTuple):
    """A committed checkpoint directory; sorts by step, then by how often the step was saved."""

    step: int
    generation: int
    name: str


def is_safe(name: str) -> bool:
    """One path component that cannot lead anywhere else."""
    return len(name) <= 255 and name not in (".", "..") and _SAFE.fullmatch(name) is not None


def step_name(step: int, generation: int = 1) -> str:
    return f"step-{step:08d}" + (f"-g{generation}" if generation > 1 else "")


def committed(names: Iterable[str]) -> list[Committed]:
    """The committed checkpoints among `names`, newest first."""
    found = []
    for name in names:
        match = _STEP.fullmatch(name)
        if match:
            found.append(Committed(int(match[1]), int(match[2] or 1), name))
    return sorted(found, reverse=True)


def next_name(step: int, names: Iterable[str]) -> str:
    """The directory name under which `step` is saved, given the names that exist."""
    same = [entry.generation for entry in committed(names) if entry.step == step]
    return step_name(step, max(same, default=0) + 1)


def free_name(wanted: str, names: Iterable[str]) -> str:
    """`wanted`, or `wanted.2`, `wanted.3`, ... when it is taken."""
    taken, candidate, count = set(names), wanted, 1
    while candidate in taken:
        count += 1
        candidate = f"{wanted}.{count}"
    return candidate


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.bin"


def frozen_file(rank: int, checksums: bytes) -> str:
    """Of a rank's frozen pieces, after their checksums: equal names in two checkpoints mean equal bytes."""
    return f"rank-{rank:05d}-{xxhash.xxh3_128_hexdigest(checksums)}.bin"


_LONGEST = 300


def point(store: Store, mark: str, checkpoint: str) -> None:
    """Lets `mark` name `checkpoint`, by one rename: a reader sees the old name or the new one."""
    pending = f"{SAVING}{mark}"
    store.remove(pending)
    store.write(pending, [checkpoint.encode() + b"\n"])
    store.rename(pending, mark)


def pointed(store: Store, mark: str) -> str | None:
    """The name that `mark` has, whether or not there is such a checkpoint; None without the mark.

    Raises:
        CheckpointError: it does not hold a name.
    """
    try:
        name = store.read(mark).decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    if not is_safe(name):
        raise CheckpointError(f"{mark} does not name a checkpoint")
    return name


def marked(store: Store) -> dict[str, str]:
    """The names that the marks of a store have, `latest` included, by mark. Other files of the store are left out."""
    found = {}
    for name in store.list():
        if is_safe(name) and name != OWNER and not name.startswith((SAVING, ".")) and not committed([name]):
            try:
                target = pointed(store, name) if store.size(name) <= _LONGEST else None
            except (CheckpointError, OSError):  # a directory, a file of something else
                continue
            if target is not None and committed([target]):
                found[name] = target
    return found


def check_mark(mark: str) -> None:
    """Raises a CheckpointError for a name that means something else in a store."""
    if not is_safe(mark) or mark in (LATEST, OWNER) or mark.startswith((SAVING, ".")) or committed([mark]):
        raise CheckpointError(f"{mark!r} cannot be the name of a mark; take a word such as 'best'")
