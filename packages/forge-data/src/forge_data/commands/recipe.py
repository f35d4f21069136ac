"""The parts of a recipe that its data depend on, read without knowing the rest."""

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
    """The keys of a recipe that its data depend on; the others are the trainer's affair."""

    job: JobKeys = field(default_factory=JobKeys)
    data: Data = field(default_factory=Data)
    train: TrainKeys = field(default_factory=TrainKeys)

    @property
    def workspace(self) -> Path:
        """Where the run of the recipe keeps prepared data."""
        return (Path(self.job.dir) if self.job.dir else Path("runs") / self.job.name) / "data"


def read_recipe(recipe: str | Path | Table, overrides: Sequence[str] = ()) -> Recipe:
    """A TOML file, or a preset by its name; a tree that was read from elsewhere, which grants no Python file the right to run.

    Raises:
        ConfigError: every fault in the parts that matter here.
    """
    registry = Registry()
    layered = load_layers(recipe, overrides, Recipe, registry)
    if layered.faults:
        raise ConfigError(layered.faults)
    return _resolved(layered.tree, registry)


def recipe_of(tables: Mapping[str, Any], origin: str) -> Recipe:
    """The recipe in plain tables, as a checkpoint carries it; `origin` names it in messages.

    Raises:
        ConfigError: a component that it names is not installed, or reads other keys by now.
        CheckpointError: the data had secrets, which it does not carry.
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
