"""Migrates configurations that tests write."""

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from forge_train.migration.concepts import world_of
from forge_train.migration.engine import Migration
from forge_train.migration.formats import read_source
from forge_train.migration.writer import recipe_text
from forge_train.recipe.load import load_recipe


class Migrated(NamedTuple):
    """A translation, its recipe as plain values, and the file that was written."""

    migration: Migration
    recipe: dict[str, Any]
    path: Path

    def kinds(self, key: str) -> set[str]:
        return {outcome.kind for outcome in self.migration.outcomes if outcome.key == key}

    def note(self, key: str) -> str:
        return " ".join(outcome.note for outcome in self.migration.outcomes if outcome.key == key)

    def at(self, path: str) -> Any:
        value: Any = self.recipe
        for name in path.split("."):
            value = value[int(name)] if isinstance(value, list) else value[name]
        return value

    def check(self) -> None:
        """Checks the recipe as `forge-train check` does, for the number of processes it was written for."""
        load_recipe(self.path, [], world_of(self.migration))


def migrate_text(
    folder: Path, name: str, text: str, framework: str | None = None, world: int | None = None, function: str | None = None
) -> Migrated:
    """Writes a configuration to a folder and migrates it."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    found, source = read_source(path, framework, function)
    migration = Migration(found, source, world)
    migration.run()
    written = recipe_text(migration, name)
    out = folder / "recipe.toml"
    out.write_text(written)
    return Migrated(migration, tomllib.loads(written), out)


Migrate = Callable[..., Migrated]
