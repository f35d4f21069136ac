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
