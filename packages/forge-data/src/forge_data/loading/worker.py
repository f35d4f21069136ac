"""A loader worker: makes rows in shared memory until the process that asks for them goes away.

Called as `python -m forge_data.loading.worker MESSAGES MEMORY` with two inherited sockets: messages both ways, and descriptors
of the memory that a message announces. Every message but those is answered by (kind, content, traceback); before an answer, what
sources say while they are read is sent on as ("said", message, "").
"""

import contextlib
import io
import mmap
import os
import pickle
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_core.errors import ForgeError
from forge_core.registry import run_file

if TYPE_CHECKING:
    from forge_data.loading.rows import RowReader


def main() -> None:
    """Serves one pool."""
    # The trainer decides when to stop: a signal to the whole group must not end the data of its last step.
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    messages: Connection[Any, Any] = Connection(int(sys.argv[1]))
    memory = socket.socket(fileno=int(sys.argv[2]))
    threading.Thread(target=_end_with, args=(memory.fileno(),), daemon=True).start()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _serve(messages, memory)
    os._exit(0)  # nothing is left to flush; a source's threads may never end


def _serve(messages: "Connection[Any, Any]", memory: socket.socket) -> None:
    reader: Any = None
    arrays: dict[int, np.ndarray] = {}

    def say(message: str) -> None:
        """What sources say when they are opened, the trainer has said."""
        if reader is not None:
            messages.send(("said", message, ""))

    while True:
        received = messages.recv_bytes()
        try:
            if reader is None:
                reader, answer = _open(received, say)
            else:
                kind, *arguments = pickle.loads(received)  # noqa: S301 from the process that started this one
                if kind == "map":
                    _map(arrays, memory, *arguments)
                    continue
                if kind == "seek":
                    reader.seek(*arguments)
                    continue
                answer = _fill(reader, arrays, *arguments)
        except BaseException as error:  # noqa: BLE001 the trainer raises again what a source raised
            refused = isinstance(error, ForgeError)
            said = str(error) if refused else f"{type(error).__name__}: {error}"
            messages.send(("refused" if refused else "failed", said, traceback.format_exc()))
            continue
        messages.send(("ok", answer, ""))


def _open(received: bytes, say: Callable[[str], None]) -> "tuple[RowReader, str]":
    """What the trainer reads, opened here too, and the fingerprint that shows it."""
    content = io.BytesIO(received)
    paths, files = pickle.load(content)  # noqa: S301 as above
    sys.path[:] = paths
    _load_files(files)
    recipe = pickle.load(content)  # noqa: S301 as above
    from forge_data.loading.rows import open_rows
    from forge_data.loading.sources import context_of, open_sources
    from forge_data.order.cursor import fingerprint_of

    reader = open_rows(recipe.spec, open_sources(recipe.spec, context_of(recipe.spec, say)), say)
    return reader, fingerprint_of(reader.order.identity_at(None))


def _load_files(files: Mapping[str, tuple[Path, bytes]]) -> None:
    """Modules of components that a recipe names by file, under the name that pickle looks for: what the trainer itself ran."""
    for name, (path, content) in files.items():
        run_file(name, path, content)


def _map(arrays: dict[int, np.ndarray], memory: socket.socket, slot: int, size: int, kept: frozenset[int]) -> None:
    _, descriptors, _, _ = socket.recv_fds(memory, 1, 1)
    for gone in arrays.keys() - kept:
        del arrays[gone]
    arrays[slot] = np.frombuffer(mmap.mmap(descriptors[0], size), dtype=np.uint8)
    os.close(descriptors[0])


def _fill(
    reader: "RowReader",
    arrays: Mapping[int, np.ndarray],
    slot: int,
    count: int,
    length: int,
    step: int,
    start: int,
    stop: int,
) -> dict[str, dict[str, Any]]:
    from forge_data.loading.rows import Rows

    reader.fill(Rows(arrays[slot], count, length, reader.spec.marks), step, start, stop)
    return reader.positions_after(step)


def _end_with(descriptor: int) -> None:
    """Ends this process when the other end of a socket is closed, also in the middle of a read that never returns."""
    poll = select.poll()
    poll.register(descriptor, 0)  # hang-ups are always reported
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    main()
