"""Runs as processes: how one is started, asked to stop, and what its end means."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from forge_ckpt.resilience.local_ranks import FOLLOWS
from forge_ckpt.resilience.progress import NoProgress
from forge_ckpt.resilience.restarts import FAULTY, FULL
from forge_core.lines import lines_of
from forge_train.process.stop import HOOK_FAILED, REQUEUE, RolledBackTooOften, TrainingError

TAIL = 12
"""Lines of a run's output that are shown where it failed."""
LOST = (FOLLOWS, FAULTY, FULL)
"""Exit codes after which a run that is started again goes on: a rank was lost, its machine failed a probe, or it had too little
memory and noted what fits."""
_BAD = (TrainingError.exit_code, RolledBackTooOften.exit_code)
_FINAL = (2, 4, NoProgress.exit_code)
"""Exit codes that another start would repeat: a refusal, a run that another job has taken over, and one that got nowhere."""


class Process(Protocol):
    """A run that was started."""

    def poll(self) -> int | None:
        """Its exit code; None while it goes on."""
        ...

    def stop(self, hard: bool) -> None:
        """Asks it to save and end, or ends it at once."""
        ...


class Start(Protocol):
    """Starts what a command line says, with its output at the end of a file."""

    def __call__(self, command: Sequence[str], environment: Mapping[str, str], output: Path) -> Process: ...


class Child:
    """A process in a session apart from this one, so that a terminal's Ctrl-C reaches it once, through the sweep."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process

    def poll(self) -> int | None:
        return self.process.poll()

    def stop(self, hard: bool) -> None:
        with suppress(ProcessLookupError):
            if hard:
                os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.send_signal(signal.SIGTERM)


def start(command: Sequence[str], environment: Mapping[str, str], output: Path) -> Process:
    """As `Start` says."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("ab") as file:
        return Child(
            subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        )


def command_of(arguments: Sequence[str], processes: int = 1) -> list[str]:
    """The command line of `forge-train run ...`, which starts several processes by itself; its code is the first cause's."""
    return [sys.executable, "-m", "forge_train", *arguments, *([f"--processes={processes}"] if processes > 1 else [])]


def meaning(code: int, asked: bool) -> str:
    """What the end of a run means: `finished`, `stopped`, `diverged`, `refused`, `lost`, which goes on at another start, or
    `failed`, which is worth a try. What was asked to stop has stopped."""
    if code in (0, HOOK_FAILED):
        return "finished"
    if code == REQUEUE or asked:
        return "stopped"
    if code in _BAD:
        return "diverged"
    if code in LOST:
        return "lost"
    return "refused" if code in _FINAL else "failed"


def tail(output: Path, lines: int = TAIL) -> tuple[str, ...]:
    """The last lines of a file that say anything."""
    try:
        with output.open("rb") as file:
            file.seek(max(0, output.stat().st_size - 64 * 1024))
            text = file.read().decode(errors="replace")
    except OSError:
        return ()
    return tuple(line.rstrip() for line in lines_of(text) if line.strip())[-lines:]
