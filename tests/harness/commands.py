"""Runs Python commands in forks of a process that has torch and Forge imported: about 0.3 s each, an interpreter of its own 3 s.

    from harness import commands

    done = commands.run("-m", "forge_train", "run", "tiny.toml", cwd=folder)     # as `subprocess.run` with capture_output
    assert done.returncode == 0, done.stderr

The process is a real one: arguments, directory, environment, standard output and error, exit code, threads, children and
`atexit` are those of the command alone. These tests need `subprocess.run`: those that look at imported modules or at the time
of a start; those of variables that the interpreter or torch reads when it begins (PYTHONWARNINGS, PYTHONHASHSEED; but
OMP_NUM_THREADS is honored); and those of how an interpreter ends (modules and their objects are not taken down here).

`python -m harness.commands SOCKET` is the process that forks. It ends with the test process.
"""

import atexit
import contextlib
import gc
import importlib
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from harness import forker, wire
from harness.pool import START

WITHOUT_TORCH = (
    "pydantic",
    "forge_train.cli",
    "forge_train.recipe.load",
)
"""What commands import that need no torch."""

PRELOAD = (
    *WITHOUT_TORCH,
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "rich.console",
    "forge_models.decoder",
    "forge_parallel.optim.elementwise",
    "forge_train.commands.run",
    "forge_train.run.loop",
    "forge_train.report.page",
)
"""What most commands import, imported once. None of these may start a thread: a fork has only the thread that forks."""


@dataclass(frozen=True)
class Command:
    """One command: the words after `python`, and where it runs."""

    words: tuple[str, ...]
    directory: str
    environment: dict[str, str]


def run(
    *words: str, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 120.0, torch: bool = True
) -> "subprocess.CompletedProcess[str]":
    """`python *words`, captured; words begin with `-m MODULE`, `-c CODE` or the path of a script.

    With `torch=False` the command runs in a fork of another process, which has not imported torch.

    Raises:
        subprocess.TimeoutExpired: the command, or a process that it started and that holds its output, still runs after
            `timeout` seconds. It is killed with all processes of its group.
    """
    server = _servers[PRELOAD if torch else WITHOUT_TORCH]
    return server.run(Command(words, str(cwd or Path.cwd()), dict(os.environ if env is None else env)), timeout)


class _Server:
    """The process that forks; starts at the first command."""

    def __init__(self, modules: tuple[str, ...]) -> None:
        self._modules = modules
        self._directory: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._control: Connection[Any, Any] | None = None

    def run(self, command: Command, timeout: float) -> "subprocess.CompletedProcess[str]":
        control, deadline = self._started(), time.monotonic() + timeout
        assert self._process is not None
        output, errors = os.pipe(), os.pipe()
        texts = {output[0]: b"", errors[0]: b""}
        answered = False
        try:
            try:
                wire.send(control, command)
                for pipe in (output, errors):
                    send_handle(control, pipe[1], self._process.pid)
                pid = wire.receive(control)
            finally:
                os.close(output[1])
                os.close(errors[1])
            ended = _read(texts, deadline) and control.poll(max(0.0, deadline - time.monotonic()))
            if not ended:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            code = wire.receive(control)
            answered = True
        finally:
            for end in texts:
                os.close(end)
            if not answered:  # an interrupt, or the server is gone: the next command gets a new one
                self.close()
        said, complained = (text.decode(errors="replace") for text in texts.values())
        arguments = ["python", *command.words]
        if not ended:
            raise subprocess.TimeoutExpired(arguments, timeout, said, complained)
        return subprocess.CompletedProcess(arguments, code, said, complained)

    def _started(self) -> "Connection[Any, Any]":
        if self._control is not None:
            return self._control
        self._directory = Path(tempfile.mkdtemp(prefix="forge-commands-"))
        listener = wire.Listener(self._directory / "socket")
        path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "harness.commands", str(self._directory / "socket")],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C goes to pytest alone
        )
        self._control = listener.accept(START)
        listener.close()
        wire.send(self._control, self._modules)
        assert wire.receive(self._control) == "ready"
        return self._control

    def close(self) -> None:
        """Ends the server and what it runs."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.wait(timeout=10)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._directory = self._process = self._control = None


_servers = {modules: _Server(modules) for modules in (PRELOAD, WITHOUT_TORCH)}
for _each in _servers.values():
    atexit.register(_each.close)


def _read(texts: dict[int, bytes], deadline: float) -> bool:
    """Reads all pipes to their ends, as long as there is time: true when all have ended."""
    still = set(texts)
    while still:
        ready = wait(still, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            return False
        for end in ready:
            assert isinstance(end, int)
            if part := os.read(end, 1 << 16):
                texts[end] += part
            else:
                still.discard(end)
    return True


def serve(path: str) -> Command:
    """Takes commands until the test process is gone. Returns in the forks, each with its command."""
    control = wire.connect(path)
    for name in wire.receive(control):
        importlib.import_module(name)
    gc.freeze()  # what is imported never becomes garbage
    wire.send(control, "ready")
    parent = os.getpid()
    while True:
        try:
            command = wire.receive(control)
            output, errors = recv_handle(control), recv_handle(control)
        except (EOFError, OSError):
            os._exit(0)
        pid = os.fork()
        if not pid:
            control.close()
            os.setpgid(0, 0)
            forker.die_with_parent(parent)
            _stand_in(command, output, errors)
            return command
        with contextlib.suppress(OSError):  # the child may have done so, and may even have ended
            os.setpgid(pid, pid)
        os.close(output)
        os.close(errors)
        wire.send(control, pid)
        done = status = 0
        while not done:
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done and control.poll(0.005):  # the test process says nothing now: it is gone
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                os._exit(0)
        wire.send(control, os.waitstatus_to_exitcode(status))


def _stand_in(command: Command, output: int, errors: int) -> None:
    """Gives this process the streams, the directory and the environment of `command`, and the path of a new interpreter."""
    for descriptor, number in ((output, 1), (errors, 2)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 the process's own
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    mine = os.environ["PYTHONPATH"].split(os.pathsep)
    os.environ.clear()
    os.environ.update(command.environment)
    os.chdir(command.directory)
    given = [str(Path(path).absolute()) for path in command.environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[1:] = [*given, *(path for path in sys.path[1:] if path not in mine)]
    importlib.invalidate_caches()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(command.environment.get("OMP_NUM_THREADS") or os.cpu_count() or 1))


def execute(words: tuple[str, ...]) -> None:
    """What an interpreter with these words does after its start."""
    first, *rest = words
    if first == "-m":
        sys.path[0] = str(Path.cwd())
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *rest[1:]]
        sys.modules["__main__"] = module = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), module.__dict__)  # noqa: S102
    else:
        sys.path[0] = str(Path(first).absolute().parent)
        sys.argv = list(words)
        runpy.run_path(first, run_name="__main__")


def finish(asked: SystemExit | None) -> NoReturn:
    """The end of an interpreter without taking down its modules, which takes half a second after torch was imported."""
    code = None if asked is None else asked.code
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    ended = None
    try:
        execute(serve(sys.argv[1]).words)
    except SystemExit as exit_:
        ended = exit_
    finish(ended)
