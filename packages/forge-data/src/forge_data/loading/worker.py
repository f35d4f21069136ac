"""A loader worker: a process that builds rows in shared memory until the training process ends.

Called as `python -m forge_data.loading.worker MESSAGES MEMORY` with two inherited sockets: MESSAGES carries messages both ways,
MEMORY the file descriptors that "map" messages announce. Requests are answered by (kind, content, traceback). Messages of
sources are sent before the answer as ("said", message, "").
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
    # The trainer decides when to stop: a signal to the process group must not interrupt the data of its last step.
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    messages: Connection[Any, Any] = Connection(int(sys.argv[1]))
    memory = socket.socket(fileno=int(sys.argv[2]))
    threading.Thread(target=_end_with, args=(memory.fileno(),), daemon=True).start()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _serve(messages, memory)
    os._exit(0)  # nothing needs flushing, and threads of a source may never end


def _serve(messages: "Connection[Any, Any]", memory: socket.socket) -> None:
    reader: Any = None
    arrays: dict[int, np.ndarray] = {}

    def say(message: str) -> None:
        """Forwards a message of a source, except while sources are opened: the trainer prints those messages itself."""
        if reader is not None:
            messages.send(("said", message, ""))

    while True:
        received = messages.recv_bytes()
        try:
            if reader is None:
                reader, answer = _open(received, say)
            else:
                kind, *arguments = pickle.loads(received)  # noqa: S301 from the parent process
                if kind == "map":
                    _map(arrays, memory, *arguments)
                    continue
                if kind == "seek":
                    reader.seek(*arguments)
                    continue
                answer = _fill(reader, arrays, *arguments)
        except BaseException as error:  # noqa: BLE001 the trainer raises the error of a source again
            refused = isinstance(error, ForgeError)
            said = str(error) if refused else f"{type(error).__name__}: {error}"
            messages.send(("refused" if refused else "failed", said, traceback.format_exc()))
            continue
        messages.send(("ok", answer, ""))


def _open(received: bytes, say: Callable[[str], None]) -> "tuple[RowReader, str]":
    """Opens the trainer's data in this process; returns the reader and the fingerprint of its sample order."""
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
    """Runs the files of components that a recipe names by file, with the trainer's content, under the names that pickle uses."""
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
    from forge_data.loading.rows import TokenRows

    reader.fill(TokenRows(arrays[slot], count, length, reader.spec.marks), step, start, stop)
    return reader.positions_after(step)


def _end_with(descriptor: int) -> None:
    """Ends this process when the other end of a socket is closed, even during a read that never returns."""
    poll = select.poll()
    poll.register(descriptor, 0)  # hang-ups are always reported
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    main()
