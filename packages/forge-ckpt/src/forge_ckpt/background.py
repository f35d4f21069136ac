"""Saves in the background: training waits only while its state is copied in memory.

A save contains the state at the moment of `BackgroundSaves.save`; later steps do not change it. Saves are written one at a
time, in the order in which they were requested, by a saver process or by a thread of this process. A save that fails fails on
all ranks and changes nothing else. `SaverProcess` is the parent's side of the saver: it starts the process, sends drafts, and
runs its collectives (docs/adr/0033).
"""

import json
import logging
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, NamedTuple

from forge_ckpt.checkpoint.fence import Fence
from forge_ckpt.checkpoint.retention import RetentionPolicy
from forge_ckpt.checkpoint.save import draft_of
from forge_ckpt.checkpoint.write import Draft, SaveRequest, lengths_of, write
from forge_ckpt.child import Channel, SharedMemory, files_in
from forge_ckpt.format.codec import check_meta
from forge_ckpt.format.rank_files import pack
from forge_ckpt.world import describe_error
from forge_core.errors import CheckpointError
from forge_core.machine import available_memory
from forge_core.protocols.checkpoint import Piece, Store, World
from forge_core.terminal import size

_log = logging.getLogger(__name__)
_ASKS, _HAS_ENDED = b"asks", b"has ended"
_NOT_PICKLED = (OSError, pickle.PicklingError, AttributeError, TypeError)
"""Errors of `pickle` for a store that cannot be pickled, and of the system for a process that cannot be started."""


@dataclass
class SaverProcess:
    """Writes checkpoints from shared memory in a separate process, one after the other.

    A saver that dies does not block other ranks: before each collective of a save, all parents exchange whether their saver is
    alive. If one is not, the save fails on all ranks with the same message. The next save starts a new saver.

    Attributes:
        store: the store, which must be picklable.
        world: the ranks that save together, in a group that nothing else uses at the same time.
        memories: shared memories of drafts.
        mark: mark of the job's `Fence`, which the saver checks before it changes anything; empty without a fence.
    """

    store: Store
    world: World
    memories: Sequence[SharedMemory]
    mark: str = ""
    process: subprocess.Popen[bytes] | None = None
    channel: Channel | None = None

    def write(self, draft: Draft, order: SaveRequest, memory: int) -> str:
        """Collective: does the same as `forge_ckpt.checkpoint.write.write`, with the bytes of `draft` in `memories[memory]`.

        Raises:
            CheckpointError: the save failed; the message is equal on all ranks.
        """
        try:
            end = self._supervise(draft, order, memory)
        except EOFError:
            end = {"stopped": self._tell(f"its saver {self._ended()}")}
        except _NOT_PICKLED as cause:
            end = {"stopped": self._tell(f"its saver could not be started: {describe_error(cause)}")}
        if "stopped" in end:
            self.close()  # its remaining messages concern a save that has ended
            raise CheckpointError(f"the checkpoint of step {order.step} was not saved: {end['stopped']}")
        if fault := self._fault(_HAS_ENDED):
            raise CheckpointError(f"the checkpoint of step {order.step} may not have been saved: {fault}")
        if "failed" in end:
            raise CheckpointError(end["failed"])
        return end["name"]

    def _supervise(self, draft: Draft, order: SaveRequest, memory: int) -> dict[str, str]:
        """Collective: sends one draft to the saver; returns the saver's result, or why it was stopped.

        Raises:
            EOFError: the saver has died.
        """
        channel = self._started()
        moving, frozen = lengths_of(draft)
        head = {
            "lengths": moving,
            "frozen": frozen,
            "error": draft.error,
            "memory": memory,
            "rank": self.world.rank,
            "size": self.world.size,
        }
        rules = order.keep if isinstance(order.keep, RetentionPolicy) else RetentionPolicy(order.keep)
        request = {"step": order.step, "meta": dict(order.meta), "keep": asdict(rules)}
        request |= {"spare": sorted(order.spare), "marks": dict(order.marks)}
        channel.send({**head, "order": request, "mark": self.mark}, pack(draft.table, with_signature=True))
        while True:
            head, payloads = channel.receive()
            if "log" in head:
                logging.getLogger(head["name"]).log(head["level"], "%s", head["log"])
            elif "collective" not in head:
                return head
            elif fault := self._fault(_ASKS):
                return {"stopped": fault}
            elif head["collective"] == "broadcast":
                channel.send({}, self.world.broadcast(payloads[0] if self.world.rank == 0 else None))
            elif head["collective"] == "gather":
                channel.send({}, *self.world.gather(payloads[0]))
            else:
                channel.send({}, *self.world.all_gather(payloads[0]))

    def close(self) -> None:
        """Ends the process, even if it is still writing."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None
        if self.process is not None:
            try:
                self.process.wait(1)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None

    def _started(self) -> Channel:
        if self.process is not None and self.process.poll() is not None:
            _log.warning("the process that writes checkpoints %s; a new one is started", self._ended())
            self.close()
        if self.channel is None:
            described = pickle.dumps(self.store)
            there, back = os.pipe(), os.pipe()
            passed = (there[0], back[1], *(memory.descriptor for memory in self.memories))
            command = [sys.executable, "-P", "-m", "forge_ckpt.child", *map(str, passed)]
            try:
                self.process = subprocess.Popen(command, pass_fds=passed, stdin=subprocess.DEVNULL)
            finally:
                os.close(there[0])
                os.close(back[1])
            self.channel = Channel(back[0], there[1])
            self.channel.send({}, described)
        return self.channel

    def _tell(self, fault: str) -> str:
        """Collective: reports to other ranks that this rank's saver has failed; returns the first such fault of all ranks."""
        return self._fault(f"rank {self.world.rank}: {fault}".encode())

    def _fault(self, state: bytes) -> str:
        """Collective: returns why the savers of the ranks cannot continue; empty if all are in the same state."""
        states = self.world.all_gather(state)
        died = next((reported for reported in states if reported not in (_ASKS, _HAS_ENDED)), None)
        if died is not None:
            return died.decode()
        return "" if len(set(states)) == 1 else "the savers of the ranks are at different points"

    def _ended(self) -> str:
        """Returns how the process ended."""
        if self.process is None:
            return "was not started"
        try:
            code = self.process.wait(10)
        except subprocess.TimeoutExpired:
            return "closed its channel"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


Busy = Literal["wait", "skip", "queue"]


class SaveResult(NamedTuple):
    """The result of one save; equal on all ranks except for `seconds`.

    Attributes:
        name: directory of the durable checkpoint; None if the save failed.
        error: why the save failed, or None.
        seconds: time from the copy to the end.
    """

    step: int
    name: str | None
    error: str | None
    seconds: float


class BackgroundSaves:
    """Collective: all background saves of one job.

    Args:
        store: the store, which is pickled for a saver process. This and `fence` can be set until the first save.
        world: the ranks, for the collectives of `save` and `settled`.
        apart: the same ranks in a group that nothing else uses, for the collectives of saves in the background.
        by: `process` leaves the interpreter to training; `thread` shares it.
        busy: what a save does if the previous one is not finished. `wait` stops training until it is; `skip` saves nothing;
            `queue` queues one save, which needs the memory of a second copy, and skips further ones.
        fence: fence of this job.
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
        """Collective: allocates the memory for copies of this state now, so that a lack of memory is an error at the start.

        Raises:
            CheckpointError: on every rank, if a host has too little memory for its ranks.
        """
        draft = draft_of(pieces, self.store)
        needed = _bytes(draft) * len(self._memories)
        own = {"host": socket.gethostname(), "needed": needed, "free": available_memory(), "error": draft.error}
        ranks = [json.loads(reply) for reply in self.world.all_gather(json.dumps(own).encode())]
        for host in dict.fromkeys(rank["host"] for rank in ranks):
            local = [rank for rank in ranks if rank["host"] == host]
            wanted = sum(rank["needed"] for rank in local)
            free = min((rank["free"] for rank in local if rank["free"] is not None), default=None)
            if free is not None and wanted > free:
                other = ", or checkpoint.busy = 'wait'" if self.busy == "queue" else ""
                raise CheckpointError(
                    f"{host} has {size(free)} of memory left, but copies of the state of {len(local)} ranks take {size(wanted)}: "
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
        """Collective: copies this rank's boxes; returns True if they will be written, False if the save is skipped.

        `settled` returns the result of the save.
        """
        if self.busy != "wait" and self._is_full():
            return False
        index, since = self._free.get(), time.monotonic()
        draft = draft_of(pieces, self.store)
        try:
            check_meta(dict(order.meta))
            order = replace(order, meta=json.loads(json.dumps(dict(order.meta))))  # a copy, because training changes it
            draft = self._copied(draft, self._memories[index])
        except Exception as cause:  # noqa: BLE001 (every rank must learn of it, which it does when the draft is written)
            order = replace(order, meta={})
            draft = replace(draft, file=None, frozen=None, error=draft.error or describe_error(cause))
        self._begun += 1
        self._orders.put((draft, order, index, since))
        return True

    def settled(self, wait: bool = False) -> list[SaveResult]:
        """Collective: returns, in order, the results that are known on all ranks and were not returned before; with `wait`, the
        results of all saves so far."""
        while wait and self._given + len(self._outcomes) < self._begun:
            time.sleep(0.005)
        known = len(self._outcomes)
        if self.world.size > 1:
            known = min(int(reply) for reply in self.world.all_gather(str(known).encode()))
        self._given += known
        return [self._outcomes.popleft() for _ in range(known)]

    def close(self) -> None:
        """Waits for the saves in progress, then ends the saver. Not collective. Call `settled` before for the results."""
        if not self._thread.is_alive():
            return
        self._orders.put(None)
        self._thread.join()
        if self._process is not None:
            self._process.close()
        for memory in self._memories:
            memory.close()

    def _is_full(self) -> bool:
        """Collective: whether any rank has no free memory for a copy."""
        full = b"1" if self._free.empty() else b""
        return any(self.world.all_gather(full))

    def _copied(self, draft: Draft, memory: SharedMemory) -> Draft:
        """Returns the same draft with its bytes copied to shared memory."""
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
        """Writes the copied drafts in order until `close`; runs in a thread."""
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
