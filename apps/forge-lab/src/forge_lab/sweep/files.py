"""Files of a sweep: the recipe of each point, which its run must keep, and `outcome.json`, the outcome of the point."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from forge_core.component import LAYOUT
from forge_core.config.changes import changes
from forge_core.config.toml import read_toml
from forge_core.errors import ForgeError
from forge_core.files import replace_file
from forge_core.redaction import redacted_text
from forge_core.registry import Registry
from forge_lab.sweep.grid import OURS, Sweep
from forge_lab.sweep.points import Point
from forge_train.directory import RECIPE
from forge_train.recipe.load import load_recipe
from forge_train.trackers import METRICS, read_metrics

SWEEP_FILE = "sweep.json"
"""File with the metric and the names of the points; it marks a directory as that of a sweep."""
_SHOWN = 5


def write_recipes(sweep: Sweep, registry: Registry | None = None) -> None:
    """Writes the recipe of every point.

    Raises:
        ForgeError: the recipe of a point that was started has changed, or the directory cannot be written.
    """
    registry = registry or Registry()
    changed = {point.name: found for point in sweep.points if (found := _changed(sweep, point, registry))}
    if changed:
        shown = [f"  {name}: {'; '.join(found)}" for name, found in list(changed.items())[:_SHOWN]]
        more = [f"  and {len(changed) - _SHOWN} more"] if len(changed) > _SHOWN else []
        raise ForgeError(
            "\n".join(
                [
                    f"{len(changed)} of {len(sweep.points)} points of {sweep.directory} were begun with another recipe:",
                    *shown,
                    *more,
                    "use another directory (--dir=PATH), undo the change, or delete "
                    f"{sweep.directory / 'points'}/NAME of each point to train it again",
                ]
            )
        )
    try:
        for point in sweep.points:
            _write(sweep.recipe_of(point), sweep.resolved[point.name].as_toml())
        search = sweep.grid.search
        about = {"metric": search.metric, "mode": search.mode, "points": [point.name for point in sweep.points]}
        _write(sweep.directory / SWEEP_FILE, json.dumps(about, indent=1))
    except OSError as cause:
        where = f"{sweep.directory} cannot be written: {cause.strerror}"
        raise ForgeError(f"the sweep's directory {where}; choose another one with --dir=PATH") from cause


def share_data(sweep: Sweep, point: Point) -> None:
    """Links the `data` folder of a point to one that all points share, unless the point has its own.

    Sharing is safe because prepared data are named by their content and prepared by one process at a time.
    """
    folder, shared = sweep.folder(point), sweep.directory / "data"
    shared.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "data").exists():
        (folder / "data").symlink_to(Path("..") / ".." / "data", target_is_directory=True)


def _changed(sweep: Sweep, point: Point, registry: Registry) -> list[str]:
    """Returns the changed keys of a point that was started, except those of the layout and those that the sweep sets."""
    path, now = sweep.recipe_of(point), sweep.resolved[point.name]
    if not (sweep.folder(point) / RECIPE).is_file() or not path.is_file() or path.read_text(encoding="utf-8") == now.as_toml():
        return []
    found = changes(load_recipe(read_toml(path), (), None, registry).outcome, now.outcome, registry)
    return [str(change) for change in found if change.key_class != LAYOUT and change.key not in OURS]


def _write(path: Path, text: str) -> None:
    """Writes a file, readable only by its owner if the text has secrets. Does not rewrite a file with the same text, because the
    tasks of a job array start at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    replace_file(path, text.encode())
    if redacted_text(text) != text:
        path.chmod(0o600)


OUTCOME_FILE = "outcome.json"

Status = Literal["waiting", "stopped", "paused", "finished", "diverged", "failed"]


@dataclass(frozen=True)
class Outcome:
    """Outcome of one point.

    Attributes:
        status: `waiting` before the first start, `stopped` on request, `paused` at a rung, `finished` at the last step,
            `diverged` if values were no longer finite, `failed` for any other end.
        step, tokens: last step of the run, and the number of tokens trained on.
        value: value of the metric at that step; None if it is missing or not finite.
        rungs: value of the metric at each rung that the point reached.
        code: exit code of the last start.
        starts: number of starts of the run.
        seconds: duration of all starts together.
        said: last output lines of a failed start.
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
        """Whether the point is finished or diverged, so that another start would change nothing."""
        return self.status in ("finished", "diverged")


def outcome_of(folder: Path) -> Outcome:
    """Reads the outcome that `write_outcome` wrote last; returns a `waiting` one if there is no readable file."""
    try:
        found = json.loads((folder / OUTCOME_FILE).read_text(encoding="utf-8"))
        return Outcome(**{**found, "said": tuple(found["said"])})
    except (OSError, ValueError, TypeError, KeyError):  # missing, or of another version: the run resumes from its checkpoint
        return Outcome()


def write_outcome(folder: Path, outcome: Outcome) -> None:
    """Writes the outcome atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / OUTCOME_FILE, json.dumps(asdict(outcome), indent=1).encode())


def reached(folder: Path, metric: str) -> tuple[int, int, float | None]:
    """Returns (step, tokens, value of the metric at that step) of a run; None if not measured at that step."""
    entries = read_metrics(folder / METRICS)
    step = max((entry["step"] for entry in entries), default=0)
    tokens = max((int(entry["tokens"]) for entry in entries if "tokens" in entry), default=0)
    values = [entry[metric] for entry in entries if entry["step"] == step and metric in entry]
    return step, tokens, values[-1] if values else None


def finite(value: float | None) -> float | None:
    """Returns the value if it is finite, else None."""
    return value if value is not None and math.isfinite(value) else None
