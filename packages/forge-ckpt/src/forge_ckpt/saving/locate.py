"""What a path on the command line means: a run, a directory of checkpoints, one checkpoint, or a mark such as `best`."""

from dataclasses import dataclass
from pathlib import Path

from forge_ckpt.format.names import MANIFEST, committed
from forge_core.errors import CheckpointError

CHECKPOINTS = "checkpoints"
"""Where a run keeps its checkpoints, below its directory."""


@dataclass(frozen=True)
class Place:
    """One checkpoint: the store's directory, the checkpoint's name, and the run's directory where it is one."""

    store: Path
    name: str
    run: Path | None


def store_of(path: Path) -> tuple[Path, str | None]:
    """The directory of checkpoints that `path` means, and the name of the checkpoint that it is itself, if it is one.

    Raises:
        CheckpointError: it is not a directory, nor a mark, or names a checkpoint that is gone.
    """
    if path.is_file():
        path = _marked(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory; give a run's directory, its checkpoints, or one checkpoint")
    path = path.resolve()
    if (path / MANIFEST).is_file():
        return path.parent, path.name
    return (path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path), None


def _marked(path: Path) -> Path:
    """The checkpoint that the file of a mark names; any other file as it is."""
    with path.open("rb") as file:
        name = file.read(300).decode(errors="replace").strip()
    if not committed([name]):
        return path
    if not (path.parent / name / MANIFEST).is_file():
        raise CheckpointError(f"{path} names {name}, which is not there; a run that goes on sets it again at its next save")
    return path.parent / name


def locate(path: Path) -> Place:
    """The checkpoint that `path` means: itself, the newest of a run's directory, or the newest of a directory of checkpoints.

    Raises:
        CheckpointError: there is none.
    """
    from forge_ckpt.ranks.world import SingleProcessWorld
    from forge_ckpt.saving.resume import resolve
    from forge_ckpt.store.store import LocalStore

    store, name = store_of(path)
    run = store.parent if store.name == CHECKPOINTS else None
    return Place(store, name or resolve(LocalStore(store), None, SingleProcessWorld()), run)
