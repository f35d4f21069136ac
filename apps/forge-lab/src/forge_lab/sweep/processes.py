"""Runs a point of a sweep as a process on this machine, or as a task of a SLURM job array."""

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
from forge_core.files import lines_of
from forge_lab.sweep.grid import Sweep
from forge_train.process.restarts import NoProgress
from forge_train.process.stop import FAULTY, FOLLOWS, FULL, HOOK_FAILED, REQUEUE, RolledBackTooOften, TrainingError

TAIL = 12
"""Number of output lines shown for a failed run."""
LOST = (FOLLOWS, FAULTY, FULL)
"""Exit codes after which a restarted run continues: a rank was lost, a machine failed a probe, or memory ran out and the run
recorded a layout that fits."""
_BAD = (TrainingError.exit_code, RolledBackTooOften.exit_code)
_FINAL = (2, 4, NoProgress.exit_code)
"""Exit codes that another start would repeat: an invalid recipe, a run taken over by another job, or a run without progress."""


class Process(Protocol):
    """A started run."""

    def poll(self) -> int | None:
        """Returns the exit code, or None while the process runs."""
        ...

    def stop(self, hard: bool) -> None:
        """Asks the process to save and exit, or kills it if `hard`."""
        ...


class StartProcess(Protocol):
    """Starts a command and appends its output to a file."""

    def __call__(self, command: Sequence[str], environment: Mapping[str, str], output: Path) -> Process: ...


class Child:
    """A process in its own session, so that Ctrl-C in a terminal reaches it once, through the sweep."""

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
    """Starts a `Child`; see `StartProcess`."""
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
    """Returns the command line of `forge-train` with the arguments. It launches several processes itself, and its exit code is
    that of the process that failed first."""
    return [sys.executable, "-m", "forge_train", *arguments, *([f"--processes={processes}"] if processes > 1 else [])]


def meaning(code: int, asked: bool) -> str:
    """Returns the meaning of an exit code: `finished`, `stopped`, `diverged`, `refused`, `lost` (continues when restarted), or
    `failed` (worth another try). `asked`: whether the run was asked to stop."""
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
    """Returns the last lines of a file that are not blank; empty if the file cannot be read."""
    try:
        with output.open("rb") as file:
            file.seek(max(0, output.stat().st_size - 64 * 1024))
            text = file.read().decode(errors="replace")
    except OSError:
        return ()
    return tuple(line.rstrip() for line in lines_of(text) if line.strip())[-lines:]


_SECONDS = 120
"""Seconds before the time limit at which SLURM sends the signal: enough to finish a step and to save."""

AGAIN = (REQUEUE, *LOST)
"""Exit codes after which a task is requeued."""

_BODY = """
# One task trains one point. When SLURM warns before the time limit or preempts the task, the run saves and the task is requeued.
# A canceled job receives the same signal, but is already completing: it saves too, but is not requeued.
# After the codes for a lost rank, a faulty machine and too little memory, the run resumes when it is restarted; a run without
# progress ends with another code.
{command} --point "$SLURM_ARRAY_TASK_ID" &
child=$!
trap 'kill -TERM "$child"' TERM USR1
wait "$child"
code=$?
while kill -0 "$child" 2>/dev/null; do wait "$child"; code=$?; done
task="${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}"
case "$code" in {requeue})
  # On a node that SLURM has lost, this shell goes on, while the task may have started again elsewhere.
  starts=$(squeue --noheader --jobs="$task" --Format=RestartCnt:12 | tr -cd 0-9)
  [ "${{starts:-${{SLURM_RESTART_COUNT:-0}}}}" = "${{SLURM_RESTART_COUNT:-0}}" ] || exit "$code"
  case "$(squeue --noheader --jobs="$task" --format=%T)" in
    CANCEL* | COMPLETING*) ;;
    *) scontrol requeue "$task" ;;
  esac ;;
esac
exit "$code"
"""


def script(sweep: Sweep, arguments: list[str], jobs: int | None) -> str:
    """Returns a script for `sbatch`: task i of the array trains point i.

    Args:
        sweep: sweep by grid or random search.
        arguments: arguments of `forge-train sweep` after the file: the directory and overrides.
        jobs: maximum number of concurrent tasks; None for no limit.

    Raises:
        ForgeError: the sweep uses successive halving, or `[slurm]` sets an option that the sweep sets.
    """
    if sweep.grid.search.kind == "halving":
        raise ForgeError(
            "search.kind = 'halving' compares all points after each rung, but the tasks of an array do not wait for each other; "
            "run the sweep inside one job (forge-train sweep ... --jobs N), or use kind = 'grid' or 'random'"
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
        raise ForgeError(f"slurm.{own[0]} is set by the sweep, because a task is one point; remove it")
    lines = [
        f"#SBATCH --{name}" + (f"={value}" if value != "" else "") for name, value in {**options, **sweep.grid.slurm}.items()
    ]
    command = shlex.join(["forge-train", "sweep", str(sweep.file.resolve()), *arguments])
    head = ["#!/bin/bash", *lines, "", f"cd {shlex.quote(str(Path(os.path.abspath('.'))))}"]  # noqa: PTH100
    return "\n".join(head) + _BODY.format(command=command, requeue=" | ".join(map(str, AGAIN)))
