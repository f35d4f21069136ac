"""One job at a time writes to a store: the newest one.

A job that starts puts its mark into the file `owner`. An older one that still runs, as when a scheduler starts a job again
before its end, or a user starts it twice, then finds a different mark and writes nothing more. It uses no lock, which a
dead job could leave behind, or that a file system would have to support.

The last look comes right before the rename that commits. A checkpoint that is committed in the moment between is whole; the newer
job sets it aside when it saves.
"""

import json
import os
import secrets
import socket
from dataclasses import dataclass
from typing import Any

from forge_ckpt.errors import Superseded
from forge_ckpt.format.names import OWNER, SAVING
from forge_ckpt.world import from_rank_0
from forge_core.errors import CheckpointError
from forge_core.protocols.checkpoint import Store, World


@dataclass(frozen=True)
class Fence:
    """This job's mark in a store; made by `take`."""

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
        """Collective: refuses when this job has lost the store.

        Raises:
            Superseded: on every rank, when another job has taken the store.
            CheckpointError: on every rank, when the mark cannot be read.
        """
        if found := from_rank_0(self.world, self.other):
            raise Superseded(found)

    def lost(self) -> bool:
        """Whether another job has taken the store; rank 0 looks, not collective. False while this cannot be told."""
        try:
            return self.world.rank == 0 and bool(self.other())
        except Exception:  # noqa: BLE001 (a store is a plugin and may raise anything; a save will say what is wrong)
            return False

    def may_write(self) -> None:
        """On one rank, not collective: `checkpoint.save.save` calls it before it changes anything.

        Raises:
            Superseded: another job has taken the store.
        """
        if found := self.other():
            raise Superseded(found)

    def other(self) -> str:
        """Says who has taken the store; empty while this job has it. On one rank, not collective."""
        try:
            found = _facts(self.store.read(OWNER))
        except FileNotFoundError:
            return "the run's checkpoints were moved away while it ran, as by another job with --fresh; this job stops writing"
        if found["mark"] == self.mark:
            return ""
        return (
            f"another job, process {found['process']} on {found['host']}, has taken over the run's directory. This "
            "job stops writing; its steps since the last checkpoint are lost. To run both jobs, give one of them another job.name"
        )


@dataclass(frozen=True)
class Owner:
    """The job that took a store last; whether it still runs is not written anywhere.

    Attributes:
        mark: as it is stored, so that another owner can be told from this one.
    """

    mark: str
    host: str
    process: int

    @classmethod
    def of(cls, store: Store) -> "Owner | None":
        """None where no job ever took the store.

        Raises:
            CheckpointError: its mark is damaged.
        """
        try:
            found = _facts(store.read(OWNER))
        except FileNotFoundError:
            return None
        return cls(found["mark"], found["host"], found["process"])

    def has_ended(self) -> bool | None:
        """Whether its process is gone; None where that cannot be told, as it ran on another host."""
        if self.host != socket.gethostname():
            return None
        try:
            os.kill(self.process, 0)
        except ProcessLookupError:
            return True
        except OSError:  # another user's
            return False
        return False


def _facts(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
        return {"mark": str(found["mark"]), "process": int(found["process"]), "host": str(found["host"])}
    except (ValueError, TypeError, KeyError) as cause:
        raise CheckpointError(f"the file {OWNER} in the checkpoint directory is damaged: {cause}") from cause
