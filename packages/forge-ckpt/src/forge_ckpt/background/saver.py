"""A saver process from its parent's side: it is started, given drafts, and its collectives are carried out here."""

import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from forge_ckpt.background.channel import Channel
from forge_ckpt.background.copies import SharedMemory
from forge_ckpt.format.table import pack
from forge_ckpt.ranks.collective import describe_error
from forge_ckpt.saving.write import Draft, SaveRequest, lengths_of
from forge_ckpt.store.policy import RetentionPolicy
from forge_core.errors import CheckpointError
from forge_core.protocols.checkpoint import Store, World

_log = logging.getLogger(__name__)
_ASKS, _HAS_ENDED = b"asks", b"has ended"
_NOT_PICKLED = (OSError, pickle.PicklingError, AttributeError, TypeError)
"""What `pickle` raises for a store that it cannot send, and the system for a process that it cannot start."""


@dataclass
class SaverProcess:
    """Writes what lies in shared memory, one checkpoint after the other.

    A saver that dies takes no other rank with it: before each collective of a save all parents tell each other whether theirs is
    alive, and where one is not, the save ends on all ranks in the same words. The next save starts a new one.

    Attributes:
        store: where to; it must be possible to pickle it.
        world: the ranks that save together, in a group that nothing else uses at the same time.
        memories: where drafts may lie.
        mark: of the job's `Fence`, which the saver looks for before it changes anything; empty where there is none.
    """

    store: Store
    world: World
    memories: Sequence[SharedMemory]
    mark: str = ""
    process: subprocess.Popen[bytes] | None = None
    channel: Channel | None = None

    def write(self, draft: Draft, order: SaveRequest, memory: int) -> str:
        """Collective: as `forge_ckpt.saving.write.write`, with the bytes of `draft` in `memories[memory]`.

        Raises:
            CheckpointError: the same on every rank.
        """
        try:
            end = self._supervise(draft, order, memory)
        except EOFError:
            end = {"stopped": self._tell(f"its saver {self._ended()}")}
        except _NOT_PICKLED as cause:
            end = {"stopped": self._tell(f"its saver could not be started: {describe_error(cause)}")}
        if "stopped" in end:
            self.close()  # what it still has to say is about a save that has ended
            raise CheckpointError(f"the checkpoint of step {order.step} was not saved: {end['stopped']}")
        if fault := self._fault(_HAS_ENDED):
            raise CheckpointError(f"the checkpoint of step {order.step} may not have been saved: {fault}")
        if "failed" in end:
            raise CheckpointError(end["failed"])
        return end["name"]

    def _supervise(self, draft: Draft, order: SaveRequest, memory: int) -> dict[str, str]:
        """Collective: has one draft written; what its saver says in the end, or why it was stopped.

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
        told = {"step": order.step, "meta": dict(order.meta), "keep": asdict(rules)}
        told |= {"spare": sorted(order.spare), "marks": dict(order.marks)}
        channel.send({**head, "order": told, "mark": self.mark}, pack(draft.table, with_signature=True))
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
            else:
                channel.send({}, *self.world.all_gather(payloads[0]))

    def close(self) -> None:
        """Ends the process; one that still writes is ended at once."""
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
            _log.warning("the process that writes checkpoints %s; another one is started", self._ended())
            self.close()
        if self.channel is None:
            described = pickle.dumps(self.store)
            there, back = os.pipe(), os.pipe()
            passed = (there[0], back[1], *(memory.descriptor for memory in self.memories))
            command = [sys.executable, "-P", "-m", "forge_ckpt.background.child", *map(str, passed)]
            try:
                self.process = subprocess.Popen(command, pass_fds=passed, stdin=subprocess.DEVNULL)
            finally:
                os.close(there[0])
                os.close(back[1])
            self.channel = Channel(back[0], there[1])
            self.channel.send({}, described)
        return self.channel

    def _tell(self, fault: str) -> str:
        """Collective: lets the other ranks know that this one's saver cannot go on; the first such fault of all."""
        return self._fault(f"rank {self.world.rank}: {fault}".encode())

    def _fault(self, state: bytes) -> str:
        """Collective: why the ranks' savers cannot go on together; empty where all are in the same state."""
        states = self.world.all_gather(state)
        died = next((found for found in states if found not in (_ASKS, _HAS_ENDED)), None)
        if died is not None:
            return died.decode()
        return "" if len(set(states)) == 1 else "the savers of the ranks are at different points"

    def _ended(self) -> str:
        """How the process came to its end."""
        if self.process is None:
            return "was not started"
        try:
            code = self.process.wait(10)
        except subprocess.TimeoutExpired:
            return "closed its channel"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
