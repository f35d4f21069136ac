"""What the pool, the forker and the workers say to each other.

All sit on one machine and belong to one user; the socket lies in a directory that only this user can enter. Only tests
use this: nothing that Forge ships unpickles anything.
"""

import pickle
import socket
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Call:
    """One function on one rank.

    Attributes:
        file: of the test module; the worker imports it by path.
        module: the name that pytest gave it, so that its classes have one identity on both sides.
        function: qualified name inside the module.
        arguments: pickled (args, kwargs), read after the module is imported.
        rank: of this worker.
        size: of the world of this call.
        store: file of the rendezvous of this call, absent so far.
        port: free TCP port for a function that makes its own process group.
        group: the worker makes the default group before the function runs.
        timeout: seconds after which a collective gives up, longer than what the pool waits.
        sys_path: where the parent looks for modules.
    """

    file: str
    module: str
    function: str
    arguments: bytes
    rank: int
    size: int
    store: str
    port: int
    group: bool
    timeout: float
    sys_path: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """What became of a call: a pickled result, or an error as text with the time at which it was raised."""

    result: bytes | None = None
    error: str = ""
    traceback: str = ""
    when: float = 0.0


def send(connection: "Connection[Any, Any]", message: Any) -> None:
    """Plain pickle by value: multiprocessing's own would send tensors as shared memory that dies with the worker."""
    connection.send_bytes(pickle.dumps(message))


def receive(connection: "Connection[Any, Any]") -> Any:
    """The next message.

    Raises:
        EOFError, ConnectionError: the other side is gone.
    """
    return pickle.loads(connection.recv_bytes())


def connect(path: str) -> "Connection[Any, Any]":
    client = socket.socket(socket.AF_UNIX)
    client.connect(path)
    return Connection(client.detach())


class Listener:
    """Accepts connections at `path`, each within a deadline."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen(64)

    def accept(self, timeout: float) -> "Connection[Any, Any]":
        self._socket.settimeout(timeout)
        accepted, _ = self._socket.accept()
        accepted.setblocking(True)
        return Connection(accepted.detach())

    def close(self) -> None:
        self._socket.close()
