"""What became of a point, as its directory says: `outcome.json` next to the files of the run."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from forge_core.durable_files import replace_file
from forge_train.trackers import METRICS, read

OUTCOME_FILE = "outcome.json"

Status = Literal["waiting", "stopped", "paused", "finished", "diverged", "failed"]


@dataclass(frozen=True)
class Outcome:
    """One point.

    Attributes:
        status: `waiting` before its first start, `stopped` where it was asked to, `paused` at a rung, `finished` at its last
            step, `diverged` when its numbers were no longer finite, `failed` for any other end.
        step, tokens: that the run reached.
        value: of the metric at that step; None where there is none, or none that is finite.
        rungs: the value at each rung that the point reached.
        code: the exit code of the last start.
        starts: of the run.
        seconds: of all starts together.
        said: the last lines of a start that failed.
    """

    status: Status = "waiting"
    step: int = 0
    tokens: int = 0
    value: float | None = None
    rungs: Mapping[str, float | None] = field(default_factory=dict)
    code: int | None = None
    starts: int = 0
    seconds: float = 0.0
    said: tuple[str, ...] = ()

    @property
    def ended(self) -> bool:
        """Whether another start would change nothing."""
        return self.status in ("finished", "diverged")


def outcome_of(folder: Path) -> Outcome:
    """What `keep` wrote last; `waiting` where there is nothing to be read."""
    try:
        found = json.loads((folder / OUTCOME_FILE).read_text(encoding="utf-8"))
        return Outcome(**{**found, "said": tuple(found["said"])})
    except (OSError, ValueError, TypeError, KeyError):  # none yet, or of another version: the run itself knows where it stands
        return Outcome()


def keep(folder: Path, outcome: Outcome) -> None:
    """Writes it whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / OUTCOME_FILE, json.dumps(asdict(outcome), indent=1).encode())


def reached(folder: Path, metric: str) -> tuple[int, int, float | None]:
    """(step, tokens, value of the metric at that step) of the run in a directory; no value where it was not measured there."""
    entries = read(folder / METRICS)
    step = max((entry["step"] for entry in entries), default=0)
    tokens = max((int(entry["tokens"]) for entry in entries if "tokens" in entry), default=0)
    values = [entry[metric] for entry in entries if entry["step"] == step and metric in entry]
    return step, tokens, values[-1] if values else None


def finite(value: float | None) -> float | None:
    """The value, if it is a number that can be compared."""
    return value if value is not None and math.isfinite(value) else None
