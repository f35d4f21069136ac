"""Resolves a path or URL from the command line: a run, its checkpoints, one checkpoint, or a mark such as `best`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from forge_ckpt.format.manifest import Manifest
from forge_ckpt.format.names import MANIFEST, committed, is_safe, marked
from forge_ckpt.store.local import MARKER, LocalStore
from forge_ckpt.store.objects import is_url
from forge_ckpt.store.remote import RemoteStore
from forge_ckpt.world import SingleProcessWorld, from_rank_0
from forge_core.errors import CheckpointError, Damaged, NewerFormat
from forge_core.protocols.checkpoint import Store, World

CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints in the directory of a run."""

AnyStore: TypeAlias = LocalStore | RemoteStore
"""A store at a path or URL, which is its `root`."""

_STEPS_SHOWN = 30


@dataclass(frozen=True)
class CheckpointLocation:
    """One checkpoint: its store, its name, and the run's directory if it is on this machine."""

    store: AnyStore
    name: str
    run: Path | None

    def manifest(self) -> Manifest:
        """Reads the manifest of the checkpoint, and compares it with the lengths of the files.

        Raises:
            Damaged: the checkpoint is damaged; the message names it.
            CheckpointError: the manifest cannot be read.
        """
        from forge_ckpt.checkpoint.verification import open_manifest

        try:
            return open_manifest(self.store, self.name)[0]
        except Damaged as cause:
            raise Damaged(f"{self.store.root}/{self.name} is damaged: {cause}") from cause
        except NewerFormat as cause:
            raise NewerFormat(f"{self.store.root}/{self.name}: {cause}") from cause


def new_store(where: str | Path) -> AnyStore:
    """Creates an empty store at a path or URL.

    Raises:
        CheckpointError: the path exists and is not an empty directory, or the URL has checkpoints.
    """
    if is_url(where):
        store = RemoteStore(str(where))
        if store.list():
            raise CheckpointError(f"{where} holds checkpoints; choose another URL")
        return store
    path = Path(where)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"{path} exists and is not an empty directory; choose another one")
    return LocalStore(path)


def store_of(where: str | Path, allow_foreign_owner: bool = False) -> tuple[AnyStore, str | None]:
    """Returns the store for a path or URL, and the name of the checkpoint if the path is a single checkpoint or a mark.

    Raises:
        CheckpointError: the path is neither a directory nor a mark, or the marked checkpoint does not exist.
    """
    if is_url(where):
        return _remote(str(where).rstrip("/"))
    root, name = _local(Path(where))
    return LocalStore(root, allow_foreign_owner=allow_foreign_owner), name


def locate(where: str | Path) -> CheckpointLocation:
    """Returns the checkpoint at a path or URL, or the newest one in a run's directory or a directory of checkpoints.

    Raises:
        CheckpointError: there is no checkpoint.
    """

    store, name = store_of(where)
    run = store.root.parent if isinstance(store.root, Path) and store.root.name == CHECKPOINTS else None
    return CheckpointLocation(store, name or resolve(store, None, SingleProcessWorld()), run)


def _local(path: Path) -> tuple[Path, str | None]:
    if path.is_file():
        path = _marked(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory; use a run's directory, its checkpoints, or one checkpoint")
    path = path.resolve()
    if (path / MANIFEST).is_file():
        return path.parent, path.name
    return (path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path), None


def _marked(path: Path) -> Path:
    """Returns the checkpoint that a mark names; returns the path of any other file unchanged."""
    with path.open("rb") as file:
        name = file.read(300).decode(errors="replace").strip()
    if not committed([name]):
        return path
    if not (path.parent / name / MANIFEST).is_file():
        raise CheckpointError(_gone(path, name))
    return path.parent / name


def _remote(url: str) -> tuple[RemoteStore, str | None]:
    """Resolves a URL like `_local`; a folder of checkpoints has the marker file of a store."""
    try:
        for folder in (url, f"{url}/{CHECKPOINTS}"):
            if MARKER in (store := RemoteStore(folder)).list():
                return store, None
        parent, _, name = url.rpartition("/")
        if not parent.endswith("/"):
            store = RemoteStore(parent)
            if MARKER in (names := store.list()) and name in names:
                name = marked(store).get(name, name)
                if name not in names:
                    raise CheckpointError(_gone(url, name))
                return store, name
    except OSError as cause:
        raise CheckpointError(f"{url} cannot be read: {cause}") from cause
    raise CheckpointError(f"{url} has no checkpoints; use the URL of a run, of its checkpoints, or of one checkpoint")


def _gone(mark: str | Path, name: str) -> str:
    return f"{mark} names {name}, which does not exist; the next save of the run sets the mark again"


def resolve(store: Store, which: str | int | None, world: World) -> str:
    """Collective: returns the directory of the checkpoint of a step (its last generation) or a name, or of the newest one.

    Raises:
        CheckpointError: there is no such checkpoint; the message lists the available steps.
    """
    names = from_rank_0(world, lambda: list(store.list()))
    if isinstance(which, str) and which in names and is_safe(which):
        return which
    steps = committed(names)
    for entry in steps:
        if which is None or entry.step == which:
            return entry.name
    place = getattr(store, "root", "the store")
    if not steps:
        raise CheckpointError(f"no checkpoint found in {place}; use a run's directory, its checkpoints, or one checkpoint")
    offered = ", ".join(str(entry.step) for entry in steps[:_STEPS_SHOWN])
    raise CheckpointError(f"checkpoint {which!r} not found in {place}; available steps: {offered}")
