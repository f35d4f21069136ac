"""The saver process, its channel to the parent, and the memory that both share. Needs no torch.

The parent copies boxes of tensors into shared memory and sends a description of the checkpoint. The child hashes and writes
them. It opens no process group: a collective is a request to the parent, and the parent returns the answer.
"""

import json
import logging
import mmap
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

from forge_ckpt.checkpoint.fence import Fence
from forge_ckpt.checkpoint.retention import RetentionPolicy
from forge_ckpt.checkpoint.write import Draft, SaveRequest, write
from forge_ckpt.format.manifest import CHUNK_BYTES
from forge_ckpt.format.rank_files import RankFile, unpack
from forge_ckpt.world import describe_error
from forge_core.protocols.checkpoint import Store


class SharedMemory:
    """Anonymous memory, shared by the processes that have its descriptor. It grows and never shrinks.

    Args:
        descriptor: descriptor of the memory of another process; None creates new memory.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _anonymous() if descriptor is None else descriptor
        self._view = memoryview(b"")

    @property
    def size(self) -> int:
        """Number of bytes that this process has mapped."""
        return len(self._view)

    def grow(self, size: int) -> None:
        """Grows to at least `size` bytes and allocates all of them now, so that no copy waits for an allocation.

        Raises:
            OSError: there is not enough memory.
        """
        if size > self.size:
            if os.fstat(self.descriptor).st_size < size:
                take = os.posix_fallocate if hasattr(os, "posix_fallocate") else _lengthen
                take(self.descriptor, 0, size)
            self._attach(size)

    def view(self, size: int) -> memoryview:
        """Returns the first `size` bytes."""
        if size > self.size:
            self._attach(size)
        return self._view[:size]

    def file(self, lengths: Sequence[int], begin: int = 0) -> RankFile:
        """Returns a file of the pieces that are stored back to back from byte `begin` on."""

        def source() -> Generator[memoryview]:
            with self.view(begin + sum(lengths)) as whole:
                start = begin
                for end in accumulate(lengths, initial=begin):
                    for at in range(start, end, CHUNK_BYTES):
                        with whole[at : min(at + CHUNK_BYTES, end)] as chunk:
                            yield chunk
                    start = end

        return RankFile(lengths, source)

    def close(self) -> None:
        """Releases the memory in this process."""
        self._view = memoryview(b"")
        os.close(self.descriptor)

    def _attach(self, size: int) -> None:
        # A view that is still in use keeps its own map alive. MAP_POPULATE maps the pages now; otherwise the first copy would
        # take five times as long.
        self._view = memoryview(mmap.mmap(self.descriptor, size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)))


def files_in(memory: SharedMemory, moving: Sequence[int], frozen: Sequence[int]) -> tuple[RankFile | None, RankFile | None]:
    """Returns the two files of a draft whose pieces are in memory one after the other; None for a file without pieces."""
    first = memory.file(moving) if moving else None
    return first, memory.file(frozen, sum(moving)) if frozen else None


def _anonymous() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("forge-checkpoint", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # not Linux: a file without a name
        return os.dup(file.fileno())


def _lengthen(descriptor: int, start: int, size: int) -> None:
    """Replaces `os.posix_fallocate` on systems without it; bytes are allocated when they are written."""
    os.ftruncate(descriptor, start + size)


Message = tuple[dict[str, Any], list[bytes]]


class Channel:
    """One end of the channel between parent and saver.

    Args:
        incoming, outgoing: file descriptors of pipes; the channel owns and closes them.
    """

    def __init__(self, incoming: int, outgoing: int) -> None:
        self._incoming = os.fdopen(incoming, "rb")
        self._outgoing = os.fdopen(outgoing, "wb")

    def send(self, head: dict[str, Any], *payloads: bytes) -> None:
        """Sends one message.

        Raises:
            EOFError: the other end is gone.
        """
        line = json.dumps({"head": head, "sizes": [len(payload) for payload in payloads]}).encode()
        try:
            for part in (line, b"\n", *payloads):
                self._outgoing.write(part)
            self._outgoing.flush()
        except (BrokenPipeError, ValueError) as cause:
            raise EOFError("the other end of the channel is gone") from cause

    def receive(self) -> Message:
        """Waits for one message.

        Raises:
            EOFError: the other end is gone.
        """
        line = self._incoming.readline()
        if not line.endswith(b"\n"):
            raise EOFError("the other end of the channel is gone")
        message = json.loads(line)
        return message["head"], self._payloads(message["sizes"])

    def close(self) -> None:
        """Closes this end, which the other end receives as EOFError."""
        for end in (self._outgoing, self._incoming):
            with suppress(BrokenPipeError):  # from data that was never read
                end.close()

    def _payloads(self, sizes: Sequence[int]) -> list[bytes]:
        payloads = [self._incoming.read(size) for size in sizes]
        if [len(payload) for payload in payloads] != list(sizes):
            raise EOFError("the other end of the channel is gone")
        return payloads


IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

GIVES_WAY = 5
"""Niceness relative to the parent. Training gets three quarters of a core that both use. With a higher value, saves would take
many times as long on a busy machine."""


class RelayWorld:
    """`World` of a saver, whose parent runs every collective for it."""

    def __init__(self, channel: Channel, rank: int, size: int) -> None:
        self.rank, self.size, self._channel = rank, size, channel

    def all_gather(self, payload: bytes) -> list[bytes]:
        return [payload] if self.size == 1 else self._ask("all_gather", payload)

    def gather(self, payload: bytes) -> list[bytes]:
        return [payload] if self.size == 1 else self._ask("gather", payload)

    def broadcast(self, payload: bytes | None) -> bytes:
        return (payload or b"") if self.size == 1 else self._ask("broadcast", payload or b"")[0]

    def _ask(self, collective: str, payload: bytes) -> list[bytes]:
        self._channel.send({"collective": collective}, payload)
        return self._channel.receive()[1]


class LogForwarder(logging.Handler):
    """Sends log records to the parent, which has the log files."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(logging.INFO)
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        self._channel.send({"log": record.getMessage(), "level": record.levelno, "name": record.name})


def main(arguments: Sequence[str]) -> None:
    """Writes saves until the channel is closed. `arguments` are the descriptors of the channel (incoming, outgoing) and of the
    shared memories."""
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
            store: Store | str = pickle.loads(sent)  # noqa: S301 (from the parent, over a private pipe)
        except Exception as cause:  # noqa: BLE001 (a store is a plugin and may raise anything)
            store = f"the store cannot be used in another process ({describe_error(cause)}); set checkpoint.saver = 'thread'"
        while True:
            _serve(channel, store, shared)
    except EOFError:
        os._exit(0)  # threads of the store must not keep this process alive


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
