"""A sweep as one job array of SLURM."""

import os
import shlex
from pathlib import Path

from forge_core.errors import ForgeError
from forge_train.process.stop import REQUEUE
from forge_train.sweep.grid import Sweep
from forge_train.sweep.processes import LOST

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
