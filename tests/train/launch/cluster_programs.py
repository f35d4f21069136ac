"""Programs of SLURM that record how they were called; small scripts in a folder that is first on PATH."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

SRUN = """#!{python}
# As srun: SIGUSR1 and SIGUSR2 reach the ranks, after which they end with WARNED; SIGTERM ends the step, unless the job ends.
import json, os, signal, sys, time
folder = "{folder}"
names = ("MASTER_PORT", "WORLD_SIZE", "RANK", "GREETING")
record = {{"arguments": sys.argv[1:], "environment": {{name: os.environ.get(name) for name in names}}, "folder": os.getcwd()}}
asked = []
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: asked.append(signal.Signals(number).name))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(137))
with open(folder + "/srun", "a") as file:
    file.write(json.dumps(record) + "\\n")
open(folder + "/ready", "w").close()
if "WAITS" in os.environ:
    until = time.monotonic() + 30
    while not asked and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.3)  # a step and a checkpoint
    open(folder + "/heard", "w").write(" ".join(asked))
    sys.exit(int(os.environ.get("WARNED", "75")))
sys.exit(int(os.environ.get("CODE", "0")))
"""

RECORDER = """#!/bin/bash
echo "$@" >> {folder}/{name}
{body}
"""

BODIES = {
    "scontrol": 'exit "${SCONTROL:-0}"',
    "squeue": 'if [[ "$*" == *RestartCnt* ]]; then echo "${RESTARTS-}"; '
    'elif [[ "$*" == *--jobs=* ]]; then echo "${STATE-RUNNING}"; else cat "$JOBS" 2>/dev/null; fi; exit "${SQUEUE:-0}"',
    "sbatch": 'cat > "$RECORDS/script"; [ -z "$SBATCH_ERROR" ] || { echo "$SBATCH_ERROR" >&2; exit 1; }; '
    'sleep "${SLEEPS:-0}"; echo "${ANSWER-41}"',
    "sinfo": "printf 'gpu\\nlong\\ngpu\\n'",
}


@dataclass
class FakeSlurm:
    """Attributes:
    folder: where the programs record their calls.
    environment: environment of a batch script on the first node of a job.
    """

    folder: Path
    environment: dict[str, str]

    def calls(self, program: str) -> list[str]:
        """Returns the arguments of each call of a program."""
        path = self.folder / program
        return path.read_text().splitlines() if path.exists() else []


def fake_slurm(folder: Path) -> FakeSlurm:
    """Writes the programs into `folder/bin`."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    (programs / "srun").write_text(SRUN.format(python=sys.executable, folder=folder))
    for name, body in BODIES.items():
        (programs / name).write_text(RECORDER.format(folder=folder, name=name, body=body))
    for file in programs.iterdir():
        file.chmod(0o755)
    job = {"SLURM_JOB_ID": "41", "RECORDS": str(folder), "JOBS": str(folder / "jobs")}
    return FakeSlurm(folder, {**os.environ, **job, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"})
