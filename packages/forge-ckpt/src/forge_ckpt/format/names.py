"""Names in a store and their meanings.

step-00000100         a committed checkpoint
step-00000100-g2      the same step saved again; the highest generation is used
.saving-*             being written; never loadable, removed by the next save
.removed-*            being removed; never loadable, removed by the next save
damaged-*             failed verification; kept for inspection
superseded-step-*     a later step from before the run went back; kept for inspection
owner                 the mark of the job that writes here
latest                one line with the name of the newest checkpoint; for people and tools, a resume does not trust it
best, ...             marks of a run, one line each; retention keeps the named checkpoints
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
    """A committed checkpoint directory; sorted by step, then by generation."""

    step: int
    generation: int
    name: str


def is_safe(name: str) -> bool:
    """Whether a name is a single path component that cannot lead out of its directory."""
    return len(name) <= 255 and name not in (".", "..") and _SAFE.fullmatch(name) is not None


def step_name(step: int, generation: int = 1) -> str:
    return f"step-{step:08d}" + (f"-g{generation}" if generation > 1 else "")


def committed(names: Iterable[str]) -> list[Committed]:
    """Returns the committed checkpoints among `names`, newest first."""
    entries = []
    for name in names:
        match = _STEP.fullmatch(name)
        if match:
            entries.append(Committed(int(match[1]), int(match[2] or 1), name))
    return sorted(entries, reverse=True)


def next_name(step: int, names: Iterable[str]) -> str:
    """Returns the directory name for the next save of `step`, given the existing names."""
    same = [entry.generation for entry in committed(names) if entry.step == step]
    return step_name(step, max(same, default=0) + 1)


def free_name(wanted: str, names: Iterable[str]) -> str:
    """Returns `wanted`, or `wanted.2`, `wanted.3`, ... if it is taken."""
    taken, candidate, count = set(names), wanted, 1
    while candidate in taken:
        count += 1
        candidate = f"{wanted}.{count}"
    return candidate


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.bin"


def frozen_file(rank: int, checksums: bytes) -> str:
    """Returns the file name of a rank's frozen pieces. It contains a hash of their checksums, so equal names mean equal bytes."""
    return f"rank-{rank:05d}-{xxhash.xxh3_128_hexdigest(checksums)}.bin"


_LONGEST = 300


def point(store: Store, mark: str, checkpoint: str) -> None:
    """Sets `mark` to `checkpoint` atomically: a reader sees the old name or the new one."""
    pending = f"{SAVING}{mark}"
    store.remove(pending)
    store.write(pending, [checkpoint.encode() + b"\n"])
    store.rename(pending, mark)


def pointed(store: Store, mark: str) -> str | None:
    """Returns the name in `mark`, even if this checkpoint does not exist; None if the mark does not exist.

    Raises:
        CheckpointError: the mark does not contain a valid name.
    """
    try:
        name = store.read(mark).decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    if not is_safe(name):
        raise CheckpointError(f"{mark} does not name a checkpoint")
    return name


def marked(store: Store) -> dict[str, str]:
    """Returns the checkpoint name of each mark of a store, including `latest`. Other files of the store are left out."""
    marks = {}
    for name in store.list():
        if is_safe(name) and name != OWNER and not name.startswith((SAVING, ".")) and not committed([name]):
            try:
                target = pointed(store, name) if store.size(name) <= _LONGEST else None
            except (CheckpointError, OSError):  # a directory, or a file that is not a mark
                continue
            if target is not None and committed([target]):
                marks[name] = target
    return marks


def check_mark(mark: str) -> None:
    """Refuses names of marks that have another meaning in a store.

    Raises:
        CheckpointError: the name is reserved or not safe.
    """
    if not is_safe(mark) or mark in (LATEST, OWNER) or mark.startswith((SAVING, ".")) or committed([mark]):
        raise CheckpointError(f"{mark!r} cannot be the name of a mark; use a word such as 'best'")
