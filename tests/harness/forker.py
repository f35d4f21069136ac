"""The one process that imports torch and forks workers from itself: a new worker costs milliseconds, not a torch import.

It stays without threads (a fork copies only the calling one), and it is the guard against orphans: when the connection
to the test process ends, for whatever reason, it kills every worker with all that the worker started.

Run as `python -m harness.forker SOCKET`.
"""

import contextlib
import ctypes
import gc
import importlib
import os
import shutil
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from harness import wire, worker

PRELOAD = (
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
    "pytest",
)
"""Imported once, shared by every worker. Nothing of Forge: workers import that as a user's process does."""


def main(path: str) -> NoReturn:
    control = wire.connect(path)
    for name in PRELOAD:
        importlib.import_module(name)
    gc.freeze()  # what is imported never becomes garbage: collecting in a worker takes 1 ms instead of 100
    alive: set[int] = set()
    wire.send(control, "ready")
    try:
        while True:
            order, value = wire.receive(control)
            if order == "fork":
                pid = _fork(path, value, control)
                alive.add(pid)
                wire.send(control, pid)
            elif order == "end":
                wire.send(control, {pid: _end(pid) for pid in value})
                alive -= set(value)
    except (EOFError, OSError):
        pass  # the test process closed the connection, or died
    finally:
        for pid in alive:
            _kill(pid)
        shutil.rmtree(Path(path).parent, ignore_errors=True)  # a test process that was killed could not
    os._exit(0)


def _fork(path: str, directory: str, control: "Connection[Any, Any]") -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        control.close()
        os.setpgid(0, 0)
        die_with_parent(parent)
        worker.serve(path, Path(directory) / str(os.getpid()))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # never back into the forker's loop, whatever happened


def die_with_parent(parent: int) -> None:
    """The kernel kills this process when the thread that forked it ends (Linux; elsewhere the forker does it)."""
    if sys.platform == "linux":
        set_pdeathsig = 1
        ctypes.CDLL(None).prctl(set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _end(pid: int) -> str:
    """How a worker ended, in words; one that still runs after its connection closed is killed."""
    for _ in range(100):
        try:
            done, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return "is gone"
        if done:
            _kill(pid, reap=False)
            code = os.waitstatus_to_exitcode(status)
            return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        time.sleep(0.01)
    _kill(pid)
    return "stopped answering"


def _kill(pid: int, reap: bool = True) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    if reap:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main(sys.argv[1])
