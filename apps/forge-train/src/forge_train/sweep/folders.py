"""Files of a sweep: the whole recipe of every point, which is what its run is started with and held to."""

import json
from pathlib import Path

from forge_core.component import LAYOUT
from forge_core.config.changes import changes
from forge_core.config.toml import read_toml
from forge_core.durable_files import replace_file
from forge_core.errors import ForgeError
from forge_core.redaction import redacted_text
from forge_core.registry import Registry
from forge_train.directory import RECIPE
from forge_train.recipe.load import load
from forge_train.sweep.grid import OURS, Sweep
from forge_train.sweep.points import Point

SWEEP_FILE = "sweep.json"
"""Names the points and their metric; its presence marks a directory as a sweep's."""
_SHOWN = 5


def settle(sweep: Sweep, registry: Registry | None = None) -> None:
    """Writes the recipe of every point, unless one of them has been trained with another.

    Raises:
        ForgeError: the recipe of a point that has begun is another one now, or the directory cannot be written.
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
                    "give the sweep another directory (--dir=PATH), undo the change, or, to train these points anew, remove "
                    f"{sweep.directory / 'points'}/NAME of each",
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
    """Prepared data are named by their content, and prepared by one process at a time, so all points can have one folder of them;
    a point that has its own keeps it."""
    folder, shared = sweep.folder(point), sweep.directory / "data"
    shared.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "data").exists():
        (folder / "data").symlink_to(Path("..") / ".." / "data", target_is_directory=True)


def _changed(sweep: Sweep, point: Point, registry: Registry) -> list[str]:
    """Keys of a point that has begun which have another value now. Where the work is done may differ."""
    path, now = sweep.recipe_of(point), sweep.resolved[point.name]
    if not (sweep.folder(point) / RECIPE).is_file() or not path.is_file() or path.read_text(encoding="utf-8") == now.as_toml():
        return []
    found = changes(load(read_toml(path), (), None, registry).outcome, now.outcome, registry)
    return [str(change) for change in found if change.key_class != LAYOUT and change.key not in OURS]


def _write(path: Path, text: str) -> None:
    """Only its owner may read a recipe that holds secrets. What is there already stays: tasks of an array start at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    replace_file(path, text.encode())
    if redacted_text(text) != text:
        path.chmod(0o600)
