"""Ensures that only one job, the newest one, writes to a store.

A job writes its mark into the file `owner` when it starts. An older job that is still running, for example because a scheduler
restarted it too early or a user started it twice, then finds a different mark and stops writing. There is no lock, which a dead
job could leave behind and which not every file system supports.

The last check is right before the rename that commits. If a newer job starts between this check and the rename, the committed
checkpoint is complete; the newer job renames it when it saves.
"""

import json
import os
import secrets
import socket
from dataclasses import dataclass
from typing import Any

from forge_ckpt.format.names import OWNER, SAVING
from forge_ckpt.world import from_rank_0
from forge_core.errors import CheckpointError, Superseded
from forge_core.protocols.checkpoint import Store, World


@dataclass(frozen=True)
class Fence:
    """This job's mark in a store; created by `take`."""

    store: Store
    world: World
    mark: str

    @classmethod
    def take(cls, store: Store, world: World) -> "Fence":
        """Collective: makes this job the owner of `store`.

        Raises:
            CheckpointError: the mark cannot be written.
        """

        def write() -> str:
            mark = secrets.token_hex(16)
            pending = f"{SAVING}{OWNER}-{mark}"
            facts = {"mark": mark, "host": socket.gethostname(), "process": os.getpid()}
            store.write(pending, [json.dumps(facts).encode() + b"\n"])
            store.rename(pending, OWNER)
            return mark

        return cls(store, world, from_rank_0(world, write))

    def check(self) -> None:
        """Collective: checks that this job still owns the store.

        Raises:
            Superseded: on every rank, if another job has taken the store.
            CheckpointError: on every rank, if the mark cannot be read.
        """
        if reason := from_rank_0(self.world, self.other):
            raise Superseded(reason)

    def lost(self) -> bool:
        """Whether another job has taken the store. Only rank 0 checks; not collective. False if the mark cannot be read."""
        try:
            return self.world.rank == 0 and bool(self.other())
        except Exception:  # noqa: BLE001 (a store is a plugin and may raise anything; the next save reports the error)
            return False

    def may_write(self) -> None:
        """Checks on one rank (not collective) that this job still owns the store; saves call it before every change.

        Raises:
            Superseded: another job has taken the store.
        """
        if reason := self.other():
            raise Superseded(reason)

    def other(self) -> str:
        """Returns a message about the job that has taken the store; empty while this job owns it. Not collective."""
        try:
            owner = _facts(self.store.read(OWNER))
        except FileNotFoundError:
            return "the run's checkpoints were moved away while it ran, as by another job with --fresh; this job stops writing"
        if owner["mark"] == self.mark:
            return ""
        return (
            f"another job, process {owner['process']} on {owner['host']}, has taken over the run's directory. This "
            "job stops writing; its steps since the last checkpoint are lost. To run both jobs, give one of them another job.name"
        )


@dataclass(frozen=True)
class Owner:
    """The job that took a store last. The store does not record whether this job is still running.

    Attributes:
        mark: mark in the store, which differs for every job.
    """

    mark: str
    host: str
    process: int

    @classmethod
    def of(cls, store: Store) -> "Owner | None":
        """Returns the owner of a store, or None if no job ever took it.

        Raises:
            CheckpointError: the mark is damaged.
        """
        try:
            owner = _facts(store.read(OWNER))
        except FileNotFoundError:
            return None
        return cls(owner["mark"], owner["host"], owner["process"])

    def has_ended(self) -> bool | None:
        """Whether the process of the job has ended; None if unknown, because it ran on another host."""
        if self.host != socket.gethostname():
            return None
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return True
        except OSError:  # a process of another user
            return False
        return False


def _facts(content: bytes) -> dict[str, Any]:
    try:
        facts = json.loads(content)
        return {"mark": str(facts["mark"]), "process": int(facts["process"]), "host": str(facts["host"])}
    except (ValueError, TypeError, KeyError) as cause:
        raise CheckpointError(f"the file {OWNER} in the checkpoint directory is damaged: {cause}") from cause
