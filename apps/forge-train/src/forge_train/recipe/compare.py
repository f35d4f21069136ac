"""Two recipes key by key: files, presets, what runs were started with, or what checkpoints were made with."""

from collections.abc import Sequence
from pathlib import Path

from forge_core.config.changes import Change, changes
from forge_core.config.toml import read_toml
from forge_core.config.tree import Table, build
from forge_core.config.validation import Resolution, walk
from forge_core.errors import CheckpointError
from forge_core.registry import Registry
from forge_train.directory import RECIPE
from forge_train.recipe.load import load
from forge_train.recipe.schema import Job


def differences(one: str, other: str, overrides: Sequence[str] = (), registry: Registry | None = None) -> list[Change]:
    """Every key whose value differs, defaults included, with the class that says what a resume makes of it.

    Args:
        one, other: a TOML file, the name of a preset, a run's directory, a checkpoint, or a directory of checkpoints.
        overrides: `--section.key=value`, laid over the second side, which is a recipe or a run then.

    Raises:
        ForgeError: a side is none of these, or a recipe has faults.
    """
    registry = registry or Registry()
    return changes(_outcome(one, (), registry), _outcome(other, overrides, registry), registry)


def _outcome(given: str, overrides: Sequence[str], registry: Registry) -> Resolution:
    path = Path(given)
    if path.is_dir() and (path / RECIPE).is_file():
        return load(read_toml(path / RECIPE), overrides, None, registry).outcome
    if path.is_dir() and not overrides and not any(path.glob("*.toml")):
        return _recorded(path, registry)
    return load(given, overrides, None, registry).outcome


def _recorded(path: Path, registry: Registry) -> Resolution:
    """The recipe that a checkpoint carries."""
    from forge_ckpt.saving.locate import locate

    place = locate(path)
    tree = build(place.manifest().meta.get("config", {}), (), lambda _: f"{place.store.root}/{place.name}", Path.cwd())
    if not isinstance(tree, Table) or not tree.items:
        raise CheckpointError(f"{place.store.root}/{place.name} has no recipe")
    return walk(Job, tree, registry)
