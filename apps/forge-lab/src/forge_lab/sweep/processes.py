"""A point of a sweep as a process of this machine, or as an element of a SLURM job array."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from forge_core.errors import ForgeError
from forge_core.lines import lines_of
from forge_lab.sweep.grid import Sweep
from forge_train.process.progress import NoProgress
from forge_train.process.stop import FAULTY, FOLLOWS, FULL, HOOK_FAILED, REQUEUE, RolledBackTooOften, TrainingError

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


class StartProcess(Protocol):
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
    """See `StartProcess`."""
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


_SECONDS = 120
"""Before a time limit, SLURM says so: enough to finish a step and to save."""

AGAIN = (REQUEUE, *LOST)
"""Exit codes of a task that is queued again."""

_BODY = """
# One task trains one point. SLURM's warning before the time limit, and a preemption, let the run save; the task is queued again.
# A job that is canceled gets the same signal, but is already completing: it saves, too, and is not queued again.
# Codes of a lost rank and of too little memory say that the run goes on when it is started again; one that gets nowhere ends with
# another code by itself.
{command} --point "$SLURM_ARRAY_TASK_ID" &
child=$!
trap 'kill -TERM "$child"' TERM USR1
wait "$child"
code=$?
while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done
task="${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}"
case "$code" in {requeue})
  case "$(squeue --noheader --jobs="$task" --format=%T)" in
    CANCEL* | COMPLETING*) ;;
    *) scontrol requeue "$task" ;;
  esac ;;
esac
exit "$code"
"""


def script(sweep: Sweep, arguments: list[str], jobs: int | None) -> str:
    """The script for `sbatch`: task i of the array trains point i.

    Args:
        sweep: one whose points are known from the start.
        arguments: of `forge-train sweep` behind the file: its directory and overrides.
        jobs: tasks at a time; as many as SLURM likes where it is None.

    Raises:
        ForgeError: the sweep halves, or an option of `[slurm]` is the array's own.
    """
    if sweep.grid.search.kind == "halving":
        raise ForgeError(
            "search.kind = 'halving' compares all points after each rung, for which the tasks of an array do not wait; run the "
            "sweep inside one job (forge-train sweep ... --jobs N), or use kind = 'grid' or 'random'"
        )
    most = f"%{jobs}" if jobs is not None else ""
    logs = (sweep.directory / "logs").resolve()
    options: dict[str, str | int] = {
        "job-name": sweep.file.stem,
        "array": f"0-{len(sweep.points) - 1}{most}",
        "ntasks": 1,
        "output": f"{logs}/%A_%a.out",
        "open-mode": "append",
        "signal": f"B:USR1@{_SECONDS}",
        "requeue": "",
    }
    if own := sorted({"array", "ntasks", "n"} & set(sweep.grid.slurm)):
        raise ForgeError(f"slurm.{own[0]}: the sweep sets it, since a task is one point; leave it out")
    lines = [
        f"#SBATCH --{name}" + (f"={value}" if value != "" else "") for name, value in {**options, **sweep.grid.slurm}.items()
    ]
    command = shlex.join(["forge-train", "sweep", str(sweep.file.resolve()), *arguments])
    head = ["#!/bin/bash", *lines, "", f"cd {shlex.quote(str(Path(os.path.abspath('.'))))}"]  # noqa: PTH100
    return "\n".join(head) + _BODY.format(command=command, requeue=" | ".join(map(str, AGAIN)))
