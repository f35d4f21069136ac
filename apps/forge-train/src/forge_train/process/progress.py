"""Ends restarts that get nowhere: a run that was started again and again without a newer checkpoint needs a person.

A file in the run's directory counts the automatic starts since the newest checkpoint became no newer. No clock is involved; a
start by hand, or from another checkpoint, begins to count anew.
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
    """The run was started again too often without a newer checkpoint. A scheduler must not do so once more."""

    exit_code = 93


def is_automatic(environment: Mapping[str, str]) -> bool:
    """Whether a launcher or a scheduler says that it has started this job before."""
    return any(environment.get(name, "0") not in ("", "0") for name in _COUNTS)


def restarts_before(directory: Path, step: int) -> int:
    """Automatic restarts from the checkpoint of this step, or from step 0, that are on record."""
    try:
        record = json.loads((directory / RESTARTS_FILE).read_text())
        return int(record["restarts"]) if record["step"] == step else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def refuse_without_progress(directory: Path, step: int, automatic: bool, most: int = MOST_RESTARTS) -> None:
    """Before a start: refuses one more automatic restart from the same checkpoint, and says so in the file `NO_PROGRESS_FILE`.

    Args:
        step: of the checkpoint that the run goes on from; 0 without one.

    Raises:
        NoProgress: `most` automatic restarts from this step went before.
    """
    if not automatic or (before := restarts_before(directory, step)) < most:
        return
    where = f"the checkpoint of step {step}" if step else "step 0"
    text = (
        f"the run in {directory} was started again {before} times from {where}, and ended each time before a newer checkpoint: "
        f"it is not started again by itself. Look at the ends of its logs; start it by hand to go on"
    )
    (directory / NO_PROGRESS_FILE).write_text(text + "\n")
    raise NoProgress(text)


def note_start(directory: Path, step: int, automatic: bool) -> None:
    """At a start that owns the directory: counts it.

    Raises:
        OSError: the file cannot be written.
    """
    restarts = restarts_before(directory, step) + 1 if automatic else 0
    new = directory / f".{RESTARTS_FILE}"
    new.write_text(json.dumps({"step": step, "restarts": restarts}))
    new.replace(directory / RESTARTS_FILE)
    (directory / NO_PROGRESS_FILE).unlink(missing_ok=True)
