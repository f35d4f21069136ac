"""Runs a function on several gloo processes that are kept between tests.

    def gradients(layout: str, seed: int) -> dict[str, torch.Tensor]:   # at module level of the test file
        ...                                                             # runs on every rank, default group is ready

    def test_fsdp_equals_one_process(world):                            # `world`: fixture, one pool per pytest process
        per_rank = world.run(gradients, 4, "dp4", seed=7, timeout=60)   # results in rank order
        assert torch.equal(per_rank[0]["w"], expected)

- Each call has a fresh default group of exactly `size` ranks; RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
  are set. `group=False` leaves making the group to the function. `fresh=True` forks processes for this call alone.
- Arguments and results are plain data, numpy arrays and tensors (by value); classes of the test file are fine.
- Workers have one thread, seed 0 and warnings as errors; environment, directory, default dtype are put back after a call.
- When a rank raises, dies or the time is up: `WorldFailed` names the first cause, then every rank's traceback or stack
  and its last output. All ranks of the call are killed, and the next call gets new workers.
- A call in which a rank has a segmentation fault, or finds its heap broken, is repeated once, with a warning that holds the
  whole story, with the native stacks of all threads: no Python of ours can cause one. Two were seen, before groups of gloo had
  one thread (docs/adr/0036). One that has a cause in the test comes again, and fails it; more than two in one run fail the run
  (`harness/crashes.py`).
- A call whose ranks refuse a schedule that splits the backward, because this torch is too old for it, skips the test.
"""

import contextlib
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from harness import crashes, wire
from harness.worker import DUMP

START = 120.0
"""Seconds within which a process must have started, on however loaded a machine."""

_BROKEN_HEAP = re.compile(r"^(malloc|free|realloc|corrupted|double free|munmap_chunk)\b.*", re.MULTILINE)
"""The last words of glibc's heap."""

_NATIVE = re.compile(r"^SIG[A-Z]+\(\d+\), PID: \d+, Thread \d+:", re.MULTILINE)
"""How torch begins the stacks of a process that a signal ends: first that of the thread that got it."""

_OLD_TORCH = re.compile(r"\w+ splits the backward, which is proven from torch [\d.]+ on, and this is torch \d+\.\d+")
"""What schedules of `forge_parallel.pipeline` say on releases of torch with which their backward is not proven."""

GRACE = 1.0
"""Seconds that the other ranks have for an error of their own after the first one."""


class WorldFailed(Exception):
    """A rank raised, died or did not answer in time; the message has every rank's story, the first cause on top."""


class Crashed(WorldFailed):
    """A rank had a segmentation fault, or glibc found its heap broken."""


def _crashed(how: str, output: str) -> bool:
    return how == "killed by SIGSEGV" or (how == "killed by SIGABRT" and _BROKEN_HEAP.search(output) is not None)


@dataclass
class _Worker:
    pid: int
    connection: "Connection[Any, Any]"
    files: Path

    def output(self) -> str:
        """The end of what this worker printed; of one that crashed also where in native code."""
        try:
            text = self.files.with_suffix(".out").read_bytes().decode(errors="replace").strip("\0\n ")
        except OSError:
            return ""
        if crash := _NATIVE.search(text):
            return text[max(0, crash.start() - 1000) :][:20_000]
        return text[-4000:]

    def stacks(self) -> str:
        with contextlib.suppress(OSError):
            return self.files.with_suffix(".stack").read_text(errors="replace").strip()
        return ""


@dataclass
class World:
    """The pool. Starts at the first call, grows when a call needs more ranks, ends with `close` or with this process. Its
    processes have `environment` besides the variables of this one."""

    environment: Mapping[str, str] = field(default_factory=dict)
    _directory: Path | None = None
    _listener: wire.Listener | None = None
    _forker: "subprocess.Popen[bytes] | None" = None
    _control: "Connection[Any, Any] | None" = None
    _workers: list[_Worker] = field(default_factory=list)
    _calls: int = 0

    def run(
        self,
        function: Callable[..., Any],
        size: int,
        *args: Any,
        timeout: float = 120.0,
        group: bool = True,
        fresh: bool = False,
        **kwargs: Any,
    ) -> list[Any]:
        """Results of `function(*args, **kwargs)` on `size` ranks, in rank order.

        Raises:
            WorldFailed: see there.
            TypeError: `function` is no module-level function.
        """
        __tracebackhide__ = True
        module, name = function.__module__, function.__qualname__
        if "<" in name or not hasattr(sys.modules.get(module), name.split(".")[0]):
            raise TypeError(f"{name} runs in other processes: define it at module level of a test file")
        call = {"module": module, "function": name, "arguments": pickle.dumps((args, kwargs)), "group": group}
        try:
            return self._attempt(call, size, timeout, fresh)
        except Crashed as crash:
            warnings.warn(f"{crashes.REPEATED}: {crash}", stacklevel=2)
            return self._attempt(call, size, timeout, fresh)

    def _attempt(self, call: dict[str, Any], size: int, timeout: float, fresh: bool) -> list[Any]:
        __tracebackhide__ = True
        team = self._team(size, fresh)
        self._calls += 1
        assert self._directory is not None
        file = sys.modules[call["module"]].__file__
        assert file is not None
        port = _free_port()
        for rank, worker in enumerate(team):
            worker.files.with_suffix(".stack").write_text("")
            wire.send(
                worker.connection,
                wire.Call(
                    **call,
                    file=file,
                    rank=rank,
                    size=size,
                    store=str(self._directory / f"store-{self._calls}"),
                    port=port,
                    timeout=timeout + 60,
                    sys_path=tuple(sys.path),
                ),
            )
        answers = self._collect(f"{call['function']} on {size} ranks", team, time.monotonic() + timeout, timeout)
        results = [pickle.loads(answer.result or b"") for answer in answers]
        self._release(team, fresh)
        return results

    def close(self) -> None:
        """Ends every process."""
        self._discard(self._workers)
        if self._control is not None:
            self._control.close()
        if self._forker is not None:
            try:
                self._forker.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self._forker.kill()
                self._forker.wait()
        if self._listener is not None:
            self._listener.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        self._directory = self._listener = self._forker = self._control = None

    def pids(self) -> list[int]:
        """Processes of the pool: the forker, then the workers."""
        return [*([self._forker.pid] if self._forker else []), *(worker.pid for worker in self._workers)]

    def _collect(self, title: str, team: list[_Worker], deadline: float, timeout: float) -> list[wire.Answer]:
        """Every rank's answer, or `WorldFailed` as soon as one failed."""
        __tracebackhide__ = True
        answers: dict[int, wire.Answer] = {}
        dead: dict[int, str] = {}
        trouble = False
        while len(answers) + len(dead) < len(team):
            open_ranks = [rank for rank in range(len(team)) if rank not in answers and rank not in dead]
            ready = wait([team[rank].connection for rank in open_ranks], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in (rank for rank in open_ranks if team[rank].connection in ready):
                try:
                    answers[rank] = wire.receive(team[rank].connection)
                except (EOFError, OSError):
                    dead[rank] = self._end([team[rank].pid])[team[rank].pid]
                if not trouble and (rank in dead or answers[rank].result is None):
                    trouble = True
                    deadline = min(deadline, time.monotonic() + GRACE)
        if not trouble and len(answers) == len(team):
            return [answers[rank] for rank in range(len(team))]
        message = self._story(title, team, answers, dead, None if trouble else timeout)
        crashed = any(_crashed(how, team[rank].output()) for rank, how in dead.items())
        self._discard(team)
        if refused := _OLD_TORCH.search(message):
            pytest.skip(refused[0])
        raise Crashed(message) if crashed else WorldFailed(message)

    def _story(
        self, title: str, team: list[_Worker], answers: dict[int, wire.Answer], dead: dict[int, str], timeout: float | None
    ) -> str:
        waiting = [rank for rank in range(len(team)) if rank not in answers and rank not in dead]
        for rank in waiting:
            with contextlib.suppress(ProcessLookupError):
                os.kill(team[rank].pid, DUMP)
        if waiting:
            time.sleep(0.3)  # the handler of a busy worker runs within microseconds, on a loaded machine a little later
        errors = sorted((answer.when, rank) for rank, answer in answers.items() if answer.result is None)
        lines = []
        for rank, how in sorted(dead.items()):
            lines.append(f"rank {rank} died: {how}")
        for _, rank in errors:
            lines.append(f"rank {rank} raised {answers[rank].error}")
        if timeout is not None:
            lines.append(f"no answer within {timeout:g} s from {_listed(waiting)}")
        first = f"{title}: {lines[0]}"
        parts = [first, *(f"  {line}" for line in lines[1:])]
        for rank in [*sorted(dead), *(rank for _, rank in errors), *waiting]:
            parts.append(f"\n===== rank {rank} =====")
            if rank in answers:
                parts.append(answers[rank].traceback.rstrip())
            elif text := team[rank].stacks():
                parts.append(text)
            if output := team[rank].output():
                parts.append(f"----- output of rank {rank} -----\n{output}")
        done = [rank for rank, answer in answers.items() if answer.result is not None]
        if done:
            parts.append(f"\n{_listed(sorted(done))} returned")
        return "\n".join(parts)

    def _release(self, team: list[_Worker], fresh: bool) -> None:
        """Lets the ranks take down their group; whoever cannot within seconds is replaced."""
        if fresh:
            self._discard(team)
            return
        try:
            for worker in team:
                wire.send(worker.connection, "release")
            for worker in team:
                if not worker.connection.poll(20):
                    raise TimeoutError
                wire.receive(worker.connection)
        except (EOFError, OSError):
            self._discard(team)

    def _team(self, size: int, fresh: bool) -> list[_Worker]:
        """The workers of a call: new ones, or those that are kept, of which more are made if there are too few."""
        if self._forker is not None and self._forker.poll() is not None:
            self.close()
        if self._forker is None:
            self._start()
        if fresh:
            return [self._fork() for _ in range(size)]
        self._workers += [self._fork() for _ in range(size - len(self._workers))]
        return self._workers[:size]

    def _fork(self) -> _Worker:
        assert self._control is not None
        assert self._listener is not None
        assert self._directory is not None
        wire.send(self._control, ("fork", str(self._directory)))
        pid = wire.receive(self._control)
        connection = self._listener.accept(START)
        assert wire.receive(connection) == pid
        return _Worker(pid, connection, self._directory / str(pid))

    def _start(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="forge-world-"))
        path = self._directory / "socket"
        self._listener = wire.Listener(path)
        here = str(Path(__file__).parents[1])
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "OMP_NUM_THREADS": os.environ.get("FORGE_TEST_THREADS", "1"),
            "HF_HUB_OFFLINE": "1",
            **self.environment,
        }
        self._forker = subprocess.Popen(
            [sys.executable, "-m", "harness.forker", str(path)],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C goes to pytest alone, which then closes the pool
        )
        self._control = self._listener.accept(START)
        assert wire.receive(self._control) == "ready"

    def _discard(self, team: list[_Worker]) -> None:
        """Kills the workers of a call. The others wait for the next one: they have imported what it needs."""
        for worker in team:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
        if team and self._control is not None:
            self._end([worker.pid for worker in team])
        for worker in team:
            worker.connection.close()
            for suffix in (".out", ".stack"):
                worker.files.with_suffix(suffix).unlink(missing_ok=True)
        self._workers = [worker for worker in self._workers if worker not in team]

    def _end(self, pids: list[int]) -> dict[int, str]:
        assert self._control is not None
        wire.send(self._control, ("end", pids))
        return wire.receive(self._control)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _listed(ranks: Iterable[int]) -> str:
    named = list(ranks)
    return f"rank{'s' if len(named) > 1 else ''} {', '.join(map(str, named))}"
