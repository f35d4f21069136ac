"""Saves in the background: training waits only while its state is copied in memory.

What is saved is the state in the moment of `Background.save`, not what training makes of it meanwhile. One save is written at a
time, in the order in which they were asked for, by a process that does nothing else or by a thread of this one. A save that fails
fails on all ranks, and changes nothing else.
"""

import json
import logging
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal, NamedTuple

from forge_ckpt.background.copies import SharedMemory, files_in
from forge_ckpt.background.saver import SaverProcess
from forge_ckpt.format.codec import check_meta
from forge_ckpt.ranks.collective import describe_error
from forge_ckpt.saving.saver import draft_of
from forge_ckpt.saving.write import Draft, SaveRequest, lengths_of, write
from forge_ckpt.store.fence import Fence
from forge_core.errors import CheckpointError
from forge_core.machine import available_memory
from forge_core.protocols.checkpoint import Piece, Store, World
from forge_core.terminal import size

_log = logging.getLogger(__name__)
Busy = Literal["wait", "skip", "queue"]


class SaveResult(NamedTuple):
    """How one save ended, the same on all ranks but for `seconds`.

    Attributes:
        name: its directory, once it is durable; None where it failed.
        error: why it failed.
        seconds: from the copy to the end.
    """

    step: int
    name: str | None
    error: str | None
    seconds: float


class BackgroundSaves:
    """Collective: the saves of one job, from its first to its last.

    Args:
        store: where to. A saver process gets it pickled. This and `fence` can be set until the first save.
        world: the ranks, for what `save` and `settled` agree on while training stands.
        apart: the same ranks in a group that nothing else uses: collectives of a save run there at any time.
        by: `process` leaves the interpreter to training; `thread` shares it.
        busy: what a save does when the one before is not finished. `wait` stops training until it is; `skip` saves nothing;
            `queue` lets one wait, which takes the memory of a second copy, and skips further ones.
        fence: of this job.
    """

    def __init__(
        self,
        store: Store,
        world: World,
        apart: World,
        *,
        by: Literal["process", "thread"] = "process",
        busy: Busy = "wait",
        fence: Fence | None = None,
    ) -> None:
        self.world, self.busy = world, busy
        self._memories = [SharedMemory() for _ in range(2 if busy == "queue" else 1)]
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for index in range(len(self._memories)):
            self._free.put(index)
        self.store, self.fence = store, fence
        self._apart, self._by = apart, by
        self._process: SaverProcess | None = None
        self._orders: queue.SimpleQueue[tuple[Draft, SaveRequest, int, float] | None] = queue.SimpleQueue()
        self._outcomes: deque[SaveResult] = deque()
        self._begun = self._given = 0
        self._thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)
        self._thread.start()

    def reserve(self, pieces: Iterable[Piece]) -> None:
        """Collective: takes the memory for copies of this state now, so that what is missing is said before hours of training.

        Raises:
            CheckpointError: on every rank, when a host has too little for the ranks on it.
        """
        draft = draft_of(pieces, self.store)
        needed = _bytes(draft) * len(self._memories)
        mine = {"host": socket.gethostname(), "needed": needed, "free": available_memory(), "error": draft.error}
        ranks = [json.loads(reply) for reply in self.world.all_gather(json.dumps(mine).encode())]
        for host in dict.fromkeys(found["host"] for found in ranks):
            there = [found for found in ranks if found["host"] == host]
            wanted = sum(found["needed"] for found in there)
            free = min((found["free"] for found in there if found["free"] is not None), default=None)
            if free is not None and wanted > free:
                other = ", or checkpoint.busy = 'wait'" if self.busy == "queue" else ""
                raise CheckpointError(
                    f"{host} has {size(free)} of memory left, but copies of the state of {len(there)} ranks take {size(wanted)}: "
                    f"set checkpoint.mode = 'sync'{other}"
                )
        error = draft.error
        try:
            for memory in self._memories:
                memory.grow(_bytes(draft))
        except OSError as cause:
            error = f"no memory for a copy of {size(_bytes(draft))}: {cause}; set checkpoint.mode = 'sync'"
        for rank, reply in enumerate(self.world.all_gather((error or "").encode())):
            if reply:
                raise CheckpointError(f"rank {rank}: {reply.decode()}")

    def save(self, pieces: Iterable[Piece], order: SaveRequest) -> bool:
        """Collective: copies this rank's boxes and returns; True when they will be written, False when the save is skipped.

        What becomes of it is an outcome of `settled`.
        """
        if self.busy != "wait" and self._is_full():
            return False
        index, since = self._free.get(), time.monotonic()
        draft = draft_of(pieces, self.store)
        try:
            check_meta(dict(order.meta))
            order = replace(order, meta=json.loads(json.dumps(dict(order.meta))))  # training changes what is in it
            draft = self._copied(draft, self._memories[index])
        except Exception as cause:  # noqa: BLE001 (every rank must learn of it, which it does when the draft is written)
            order = replace(order, meta={})
            draft = replace(draft, file=None, frozen=None, error=draft.error or describe_error(cause))
        self._begun += 1
        self._orders.put((draft, order, index, since))
        return True

    def settled(self, wait: bool = False) -> list[SaveResult]:
        """Collective: outcomes that all ranks know and that were not given before, in order; with `wait`, of all saves so far."""
        while wait and self._given + len(self._outcomes) < self._begun:
            time.sleep(0.005)
        known = len(self._outcomes)
        if self.world.size > 1:
            known = min(int(reply) for reply in self.world.all_gather(str(known).encode()))
        self._given += known
        return [self._outcomes.popleft() for _ in range(known)]

    def close(self) -> None:
        """Waits for what is being written, then ends the saver. Not collective; call `settled` first to learn how saves ended."""
        if not self._thread.is_alive():
            return
        self._orders.put(None)
        self._thread.join()
        if self._process is not None:
            self._process.close()
        for memory in self._memories:
            memory.close()

    def _is_full(self) -> bool:
        """Collective: whether some rank has no room for a copy."""
        full = b"1" if self._free.empty() else b""
        return any(self.world.all_gather(full))

    def _copied(self, draft: Draft, memory: SharedMemory) -> Draft:
        """The same draft, with its bytes in memory."""
        if not _bytes(draft):
            return draft
        memory.grow(_bytes(draft))
        at = 0
        with memory.view(_bytes(draft)) as view:
            for file in filter(None, (draft.file, draft.frozen)):
                for chunk in file.chunks():
                    view[at : at + len(chunk)] = chunk
                    at += len(chunk)
        file, frozen = files_in(memory, *lengths_of(draft))
        return replace(draft, file=file, frozen=frozen)

    def _work(self) -> None:
        """Writes what was copied, in order, until the last; runs in a thread."""
        while (work := self._orders.get()) is not None:
            draft, order, index, since = work
            name = error = None
            try:
                name = self._write(draft, order, index)
            except Exception as cause:  # noqa: BLE001 (any error frees the memory, and training learns of it)
                error = describe_error(cause)
            seconds = time.monotonic() - since
            if self.world.rank == 0 and name:
                _log.info("%s was written in the background, %.1f s after its copy", name, seconds)
            self._outcomes.append(SaveResult(order.step, name, error, seconds))
            self._free.put(index)

    def _write(self, draft: Draft, order: SaveRequest, index: int) -> str:
        if self._by == "thread":
            return write(self.store, draft, order, self._apart, self.fence.may_write if self.fence else None)
        if self._process is None:
            self._process = SaverProcess(self.store, self._apart, self._memories, self.fence.mark if self.fence else "")
        return self._process.write(draft, order, index)


def _bytes(draft: Draft) -> int:
    return sum(map(sum, lengths_of(draft)))
