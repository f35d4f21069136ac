"""Submits a script to SLURM, unless a job for the same directory is pending or running.

Jobs are recognized by their comment. It is part of the script, so jobs that were submitted with `sbatch` itself or from another
login node are recognized as well. In case a cluster replaces comments, the copies of submitted scripts in the run's directory
have the numbers of its jobs. A lock in the run's directory makes two submissions at the same time wait for each other.
"""

import fcntl
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from forge_core.errors import ForgeError
from forge_core.files import lines_of
from forge_train.launch.cluster import TASK, CheckedRun
from forge_train.launch.slurm import COMMENT

ANSWER_SECONDS = 60.0
"""Seconds to wait for an answer of SLURM's controller."""

_FOLDER = "slurm"


def submit_job(run: CheckedRun, script: str, seconds: float = ANSWER_SECONDS) -> str:
    """Submits the script and returns the number of the job.

    Raises:
        ForgeError: SLURM is missing, does not answer or refuses the job, or the run has a job already.
    """
    for program in ("sbatch", "squeue"):
        if shutil.which(program) is None:
            raise ForgeError(
                f"{program} was not found on PATH, so the job was not submitted; run this command on a login node, "
                "or print the script without --submit and submit it there"
            )
    keeper = run.directories[0]
    with _locked(keeper / _FOLDER):
        _refuse_second(run, seconds)
        job = _sbatch(script, run.folder, seconds)
        for directory in run.directories:
            copy = directory / _FOLDER / f"{job}.sh"
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(script, encoding="utf-8")
    return job


def told(run: CheckedRun, job: str) -> str:
    """Returns what to tell the user of a submitted job: how to see its state, to follow it and to cancel it."""
    logs = run.folder / run.directory / _FOLDER
    first = logs / job / "rank-00000.log" if len(run.directories) == 1 else logs / f"{job}_{TASK}" / "rank-00000.log"
    return "\n".join(
        [
            f"submitted job {job}: {run.name} on {run.world} ranks",
            f"  state:  squeue --jobs={job}",
            f"  follow: tail -F {first}",
            f"  cancel: scancel {job}   (the run saves if it can within SLURM's KillWait, and is not requeued)",
        ]
    )


def _sbatch(script: str, folder: Path, seconds: float) -> str:
    """Returns the number of the new job."""
    done = _asked(["sbatch", "--parsable"], seconds, script, folder)
    if done.returncode == 0 and (number := re.match(r"\d+", done.stdout.strip())):
        return number[0]
    words = (done.stderr or done.stdout).strip() or f"it ended with code {done.returncode}"
    raise ForgeError(f"sbatch refused the job: {words}{_remedy(words, seconds)}")


def _remedy(words: str, seconds: float) -> str:
    text = words.lower()
    if "account" in text or "qos" in text:
        return "; set slurm.account and slurm.qos to a pair that `sacctmgr show associations user=$USER` lists"
    if "partition" in text and "invalid" in text:
        try:
            names = _asked(["sinfo", "--noheader", "--format=%R"], seconds).stdout.split()
        except ForgeError:
            names = []
        known = f": {', '.join(dict.fromkeys(names))}" if names else " (`sinfo` lists them)"
        return f"; set slurm.partition (--partition) to one of the cluster's partitions{known}"
    if "node configuration" in text or "node count" in text or "memory" in text or "cpu count" in text:
        return "; ask for what the partition has: `sinfo --format='%R %D %c %m %G'` lists nodes, cores, memory and GPUs"
    if "time limit" in text:
        return "; set slurm.time (--time) to at most the limit of the partition, which `sinfo` lists"
    return "; correct the key that it names, or see the options of sbatch in the script (without --submit)"


def queued_jobs(seconds: float = ANSWER_SECONDS) -> list[tuple[str, str, str]]:
    """Returns (number, state, comment) of each job that has not ended.

    Raises:
        ForgeError: SLURM is missing or does not answer.
    """
    done = _asked(["squeue", "--noheader", "--format=%i|%T|%k"], seconds)
    if done.returncode != 0:
        raise ForgeError(
            f"squeue failed, so nothing was submitted, because the run may have a job already: {done.stderr.strip()}"
        )
    jobs = []
    for line in lines_of(done.stdout):
        number, _, rest = line.partition("|")
        state, _, comment = rest.partition("|")
        jobs.append((number.strip(), state, comment.strip()))
    return jobs


def _refuse_second(run: CheckedRun, seconds: float) -> None:
    """Checks that no job for a directory of the run is pending or running."""
    for number, state, comment in queued_jobs(seconds):
        for directory in run.directories:
            if _is_job_of(directory, number, comment):
                base = number.partition("_")[0]
                raise ForgeError(
                    f"job {number} ({state}) trains in {directory} already, so nothing was submitted: two jobs would "
                    f"take the run from each other. Wait for it, cancel it with `scancel {base}`, or set another job.name"
                )


def _is_job_of(directory: Path, number: str, comment: str) -> bool:
    base = number.partition("_")[0]
    if base.isdigit() and (directory / _FOLDER / f"{base}.sh").is_file():
        return True
    if not comment.startswith(COMMENT):
        return False
    place = comment.removeprefix(COMMENT)
    pattern = r"\d+".join(map(re.escape, place.split(TASK)))
    return re.fullmatch(pattern, str(directory)) is not None or Path(place).resolve() == directory.resolve()


def _asked(
    command: Sequence[str], seconds: float, text: str = "", folder: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    """Runs a program of SLURM. Its environment has no variables of a job in which this process may run."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name == "SLURM_CONF"}
    try:
        return subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=seconds, env=inherited, cwd=folder, check=False
        )
    except subprocess.TimeoutExpired:
        doubt = "; it may have accepted the job: look at `squeue` before you submit again" if command[0] == "sbatch" else ""
        raise ForgeError(
            f"SLURM's controller did not answer {command[0]} within {seconds:.0f} s{doubt or ', and nothing was submitted'}. "
            "`scontrol ping` says whether it is up; try again later"
        ) from None
    except OSError as cause:
        raise ForgeError(f"{command[0]} cannot be started: {cause.strerror}; nothing was submitted") from cause


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the lock of a directory inside the `with` block."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OSError as cause:
        raise ForgeError(
            f"the run's directory {folder.parent} cannot be written: {cause.strerror}; choose another with --job.dir=PATH"
        ) from cause
