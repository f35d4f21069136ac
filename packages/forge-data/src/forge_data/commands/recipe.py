"""Reads the parts of a recipe that its data depend on, without the trainer's schema."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Gt

from forge_core.config.layers import load_layers
from forge_core.config.tree import Table, build
from forge_core.config.validation import resolve
from forge_core.errors import ConfigError
from forge_core.redaction import refuse_redacted
from forge_core.registry import Registry
from forge_data.section import Data


@dataclass(frozen=True, kw_only=True)
class JobKeys:
    """Keys of `[job]`."""

    name: str = "run"
    dir: str | None = None
    seed: Annotated[int, Ge(0)] = 0


@dataclass(frozen=True, kw_only=True)
class TrainKeys:
    """Keys of `[train]`."""

    max_steps: Annotated[int, Gt(0)] = 1000
    global_batch: Annotated[int, Gt(0)] = 32


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The keys of a recipe that its data depend on."""

    job: JobKeys = field(default_factory=JobKeys)
    data: Data = field(default_factory=Data)
    train: TrainKeys = field(default_factory=TrainKeys)

    @property
    def workspace(self) -> Path:
        """Directory of the prepared data of the recipe's run."""
        return (Path(self.job.dir) if self.job.dir else Path("runs") / self.job.name) / "data"


def read_recipe(recipe: str | Path | Table, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe from a TOML file, a preset, or a parsed tree; a tree does not allow Python files to run.

    Raises:
        ConfigError: the sections `job`, `data` or `train` have faults; the error lists all of them.
    """
    registry = Registry()
    layered = load_layers(recipe, overrides, Recipe, registry)
    if layered.faults:
        raise ConfigError(layered.faults)
    return _resolved(layered.tree, registry)


def recipe_of(tables: Mapping[str, Any], origin: str) -> Recipe:
    """Returns the recipe in plain tables, as stored in a checkpoint; `origin` is its name in messages.

    Raises:
        ConfigError: a component is not installed, or its keys have changed since.
        CheckpointError: the data section contained secrets, which checkpoints do not store.
    """
    refuse_redacted({"data": tables.get("data")}, origin)
    tree = build(dict(tables), (), lambda _: origin, Path.cwd())
    assert isinstance(tree, Table)
    return _resolved(tree, Registry())


def _resolved(tree: Table, registry: Registry) -> Recipe:
    tables = {name: tree.items[name] for name in ("job", "data", "train") if name in tree.items}
    for name, section in (("job", JobKeys), ("train", TrainKeys)):
        if isinstance(table := tables.get(name), Table):
            known = section.__dataclass_fields__
            tables[name] = Table({key: item for key, item in table.items.items() if key in known}, table.origin)
    return resolve(Recipe, Table(tables, tree.origin), registry).value
