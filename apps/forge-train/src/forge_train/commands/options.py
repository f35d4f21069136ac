"""What commands share: the argument RECIPE, overrides with shell completion, and the rule of one process. No torch."""

import os
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from forge_core.errors import ForgeError, LayoutError

if TYPE_CHECKING:
    from forge_core.config.validation import Resolution
    from forge_core.registry import Registry


RECIPE = "recipe"
"""Name of the argument that takes a recipe, in every command that has one."""


class OverridesCommand(TyperCommand):
    """A command that takes overrides of a recipe."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer does. What is neither an option nor a key of a recipe is refused with what is near.

        Raises:
            ForgeError: for it.
        """
        rest = super().parse_args(ctx, args)
        unknown = [given[2:].partition("=")[0] for given in ctx.args if given.startswith("--")]
        if whole := [name for name in unknown if "." not in name]:
            known = [*_sections(), *(option[2:] for item in self.params for option in item.opts if option.startswith("--"))]
            if wrong := next((name for name in whole if name not in known), None):
                near = "".join(f" Did you mean --{name}?" for name in get_close_matches(wrong, known, n=1))
                raise ForgeError(
                    f"--{wrong} is neither an option nor a section of a recipe; its keys are written --section.key=value.{near}"
                )
        return rest

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Options of the command, then keys of the recipe that was given."""
        recipe, options = ctx.params.get(RECIPE), super().shell_complete(ctx, incomplete)
        item = type(super().shell_complete(ctx, "--")[0])  # --help is always there
        before = [part for part in ctx.args if part != "="][-1:]
        if recipe and before and before[0].startswith("--") and "=" not in before[0]:  # shells cut a word at its `=`
            return [item(name) for name in component_names(recipe, before[0].removeprefix("--")) if name.startswith(incomplete)]
        if incomplete.startswith("-"):
            options += [item(f"--{key}=") for key in recipe_keys(recipe) if f"--{key}".startswith(incomplete)]
        return options


def _sections() -> list[str]:
    from dataclasses import fields

    from forge_train.recipe.schema import Job

    return [item.name for item in fields(Job)]


def recipe_names(incomplete: str) -> list[str]:
    """Presets and TOML files whose names begin so."""
    from forge_core.config.layers import PRESETS
    from forge_core.registry import Registry

    folder = Path(incomplete).parent if "/" in incomplete else Path()
    files = [str(path) for path in sorted(folder.glob("*.toml"))] if folder.is_dir() else []
    return [name for name in (*Registry().names(PRESETS), *files) if name.startswith(incomplete)]


def recipe_keys(recipe: str | None) -> Iterator[str]:
    """Every key of a recipe that takes a value."""
    from forge_core.config.descriptions import explain

    for item in explain(*_resolution(recipe)):
        table = isinstance(item.value, dict)  # of a component, whose `name` is a key; of a section, which is none itself
        if not table or item.names:
            yield f"{item.key}.name" if table else item.key


def component_names(recipe: str, key: str) -> tuple[str, ...]:
    """What the component behind `key` (such as `optimizer.name`) may be called."""
    from forge_core.config.descriptions import explain

    outcome, registry = _resolution(recipe)
    component = key.removesuffix(".name")
    known = component != key and component in outcome.fields
    return explain(outcome, registry, component)[0].names if known else ()


def _resolution(recipe: str | None) -> "tuple[Resolution, Registry]":
    """A recipe as it stands, or the defaults where it cannot be read: a recipe that is being written has faults."""
    from forge_core.config.layers import load_layers
    from forge_core.config.tree import DEFAULT, Table
    from forge_core.config.validation import walk
    from forge_core.registry import Registry
    from forge_train.recipe.schema import Job

    registry = Registry()
    try:
        tree = load_layers(recipe, (), Job, registry).tree if recipe else Table({}, DEFAULT)
    except ForgeError:
        tree = Table({}, DEFAULT)
    return walk(Job, tree, registry), registry


RecipePath = Annotated[
    str,
    typer.Argument(help="A TOML file, or the name of a preset such as `demo`.", show_default=False, autocompletion=recipe_names),
]
"""The argument of every command that reads a recipe."""


def require_single_process(command: str) -> None:
    """Does nothing for a command that was started once.

    Raises:
        LayoutError: torchrun or srun started several processes, which would all write the same files.
    """
    from forge_parallel.launch.environment import read_launcher

    where = read_launcher(os.environ)
    if where.size > 1:
        raise LayoutError(
            f"{command} runs in one process, but this is rank {where.rank} of {where.size} ({where.launcher}); "
            f"start it without torchrun, or under SLURM with srun --ntasks=1"
        )
