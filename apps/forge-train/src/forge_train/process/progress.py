"""Stops automatic restarts without progress: a run that restarts repeatedly without a newer checkpoint needs a person.

A file in the run's directory counts the automatic restarts from the same checkpoint. A manual start, or a start from another
checkpoint, resets the count.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from forge_core.errors import ForgeError

RESTARTS_FILE = "restarts.json"
NO_PROGRESS_FILE = "no-progress.txt"
MOST_RESTARTS = 3

_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


class NoProgress(ForgeError):
    """The run was restarted too often without a newer checkpoint. A scheduler must not restart it again."""

    exit_code = 93


def is_automatic(environment: Mapping[str, str]) -> bool:
    """Returns True if a launcher or a scheduler has started this job before."""
    return any(environment.get(name, "0") not in ("", "0") for name in _COUNTS)


def restarts_before(directory: Path, step: int) -> int:
    """Returns the recorded number of automatic restarts from the checkpoint of this step, or from step 0."""
    try:
        record = json.loads((directory / RESTARTS_FILE).read_text())
        return int(record["restarts"]) if record["step"] == step else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def refuse_without_progress(directory: Path, step: int, automatic: bool, most: int = MOST_RESTARTS) -> None:
    """Refuses one automatic restart too many from the same checkpoint, and writes the reason to `NO_PROGRESS_FILE`.

    Args:
        directory: directory of the run.
        step: step of the checkpoint that the run resumes from; 0 without one.
        automatic: True if a launcher or a scheduler restarts the run.
        most: maximum number of automatic restarts from one step.

    Raises:
        NoProgress: there were already `most` automatic restarts from this step.
    """
    if not automatic or (before := restarts_before(directory, step)) < most:
        return
    where = f"the checkpoint of step {step}" if step else "step 0"
    text = (
        f"the run in {directory} was restarted {before} times from {where}, and ended each time before a newer checkpoint: "
        f"it is not restarted automatically again. Look at the ends of its logs; start it by hand to continue"
    )
    (directory / NO_PROGRESS_FILE).write_text(text + "\n")
    raise NoProgress(text)


def note_start(directory: Path, step: int, automatic: bool) -> None:
    """Counts a start in the run's directory, after the run has taken the directory over.

    Raises:
        OSError: the file cannot be written.
    """
    restarts = restarts_before(directory, step) + 1 if automatic else 0
    new = directory / f".{RESTARTS_FILE}"
    new.write_text(json.dumps({"step": step, "restarts": restarts}))
    new.replace(directory / RESTARTS_FILE)
    (directory / NO_PROGRESS_FILE).unlink(missing_ok=True)
