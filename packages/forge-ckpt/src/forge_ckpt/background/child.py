"""The process that writes checkpoints for a rank. It imports no torch, so it starts in a moment and is small.

It asks for every collective of a save over its channel, and its parent carries that out. It ends when its parent is gone.
Signals that ask a job to stop are not for it: a stop waits for the save that is under way. Where cores are scarce it gives way to
training.
"""

import logging
import os
import pickle
import signal
import sys
from collections.abc import Sequence

from forge_ckpt.background.channel import Channel
from forge_ckpt.background.copies import SharedMemory, files_in
from forge_ckpt.format.table import unpack
from forge_ckpt.ranks.collective import describe_error
from forge_ckpt.saving.write import Draft, SaveRequest, write
from forge_ckpt.store.fence import Fence
from forge_ckpt.store.policy import RetentionPolicy
from forge_core.protocols.checkpoint import Store

IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

GIVES_WAY = 5
"""Added to the niceness of the parent. Of a core that both want, training gets three quarters; with more, saves last many times
as long on a machine that is full."""


class RelayWorld:
    """`World` of a saver: its parent takes part in every collective for it."""

    def __init__(self, channel: Channel, rank: int, size: int) -> None:
        self.rank, self.size, self._channel = rank, size, channel

    def all_gather(self, payload: bytes) -> list[bytes]:
        return [payload] if self.size == 1 else self._ask("all_gather", payload)

    def broadcast(self, payload: bytes | None) -> bytes:
        return (payload or b"") if self.size == 1 else self._ask("broadcast", payload or b"")[0]

    def _ask(self, collective: str, payload: bytes) -> list[bytes]:
        self._channel.send({"collective": collective}, payload)
        return self._channel.receive()[1]


class LogForwarder(logging.Handler):
    """Sends what is logged to the parent, which has the log files."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(logging.INFO)
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        self._channel.send({"log": record.getMessage(), "level": record.levelno, "name": record.name})


def main(arguments: Sequence[str]) -> None:
    """Serves saves until the channel ends. `arguments` are descriptors: incoming, outgoing, and those of the shared memories."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    os.nice(GIVES_WAY)
    incoming, outgoing, *memories = map(int, arguments)
    channel = Channel(incoming, outgoing)
    logging.basicConfig(level=logging.INFO, handlers=[LogForwarder(channel)], force=True)
    shared = [SharedMemory(descriptor) for descriptor in memories]
    try:
        _, (sent,) = channel.receive()
        try:
            store: Store | str = pickle.loads(sent)  # noqa: S301 (from the parent, over a pipe that no one else has)
        except Exception as cause:  # noqa: BLE001 (a store is a plugin and may raise anything)
            store = f"the store cannot be used in another process ({describe_error(cause)}); set checkpoint.saver = 'thread'"
        while True:
            _serve(channel, store, shared)
    except EOFError:
        os._exit(0)  # a thread of the store must not keep this process


def _serve(channel: Channel, store: Store | str, memories: Sequence[SharedMemory]) -> None:
    head, (packed,) = channel.receive()
    if isinstance(store, str):
        channel.send({"failed": store})
        return
    file, frozen = files_in(memories[head["memory"]], head["lengths"], head["frozen"])
    draft = Draft(unpack([packed])[0], file, frozen, head["error"])
    world = RelayWorld(channel, head["rank"], head["size"])
    fence = Fence(store, world, head["mark"]) if head["mark"] else None
    order = SaveRequest(**{**head["order"], "keep": RetentionPolicy(**head["order"]["keep"])})
    try:
        name = write(store, draft, order, world, fence.may_write if fence else None)
    except EOFError:
        raise
    except Exception as cause:  # noqa: BLE001 (a store is a plugin and may raise anything; the parent tells all ranks)
        channel.send({"failed": describe_error(cause)})
    else:
        channel.send({"name": name})


if __name__ == "__main__":
    main(sys.argv[1:])
