"""Shared by commands: the argument RECIPE, overrides with shell completion, and the check for one process. No torch."""

import os
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from forge_core.errors import ForgeError, LayoutError

if TYPE_CHECKING:
    from forge_core.config.validation import Resolution
    from forge_core.registry import Registry


RECIPE = "recipe"
"""Name of the argument that takes a recipe, in every command that has one."""


class OverridesCommand(TyperCommand):
    """A command that accepts overrides of a recipe, such as `--optimizer.lr=1e-3`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses arguments as typer does, and refuses unknown options with a suggestion.

        Raises:
            ForgeError: an argument is neither an option nor a key of a recipe.
        """
        rest = super().parse_args(ctx, args)
        names = [argument[2:].partition("=")[0] for argument in ctx.args if argument.startswith("--")]
        if undotted := [name for name in names if "." not in name]:
            known = [*_sections(), *(option[2:] for item in self.params for option in item.opts if option.startswith("--"))]
            if wrong := next((name for name in undotted if name not in known), None):
                near = "".join(f" Did you mean --{name}?" for name in get_close_matches(wrong, known, n=1))
                raise ForgeError(
                    f"--{wrong} is neither an option nor a section of a recipe; write recipe keys as --section.key=value.{near}"
                )
        return rest

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Completes options of the command, then keys of its recipe."""
        recipe, options = ctx.params.get(RECIPE), super().shell_complete(ctx, incomplete)
        item = type(super().shell_complete(ctx, "--")[0])  # --help is always there
        before = [part for part in ctx.args if part != "="][-1:]
        if recipe and before and before[0].startswith("--") and "=" not in before[0]:  # shells cut a word at its `=`
            return [item(name) for name in component_names(recipe, before[0].removeprefix("--")) if name.startswith(incomplete)]
        if incomplete.startswith("-"):
            options += [item(f"--{key}=") for key in recipe_keys(recipe) if f"--{key}".startswith(incomplete)]
        return options


class ListingGroup(TyperGroup):
    """A command whose subcommand is `list` if none is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses arguments as typer does, after `list` where no subcommand is named."""
        named = args and (args[0] in self.commands or args[0] == "--help")
        return super().parse_args(ctx, args if named or ctx.resilient_parsing else ["list", *args])


def _sections() -> list[str]:
    from dataclasses import fields

    from forge_train.recipe.schema import Job

    return [item.name for item in fields(Job)]


def recipe_names(incomplete: str) -> list[str]:
    """Returns presets and TOML files whose names begin with `incomplete`."""
    from forge_core.config.layers import PRESETS
    from forge_core.registry import Registry

    folder = Path(incomplete).parent if "/" in incomplete else Path()
    files = [str(path) for path in sorted(folder.glob("*.toml"))] if folder.is_dir() else []
    return [name for name in (*Registry().names(PRESETS), *files) if name.startswith(incomplete)]


def recipe_keys(recipe: str | None) -> Iterator[str]:
    """Yields every key of a recipe that has a value."""
    from forge_core.config.descriptions import explain

    for item in explain(*_resolution(recipe)):
        table = isinstance(item.value, dict)  # a component, whose `name` is a key, or a section, which has no value itself
        if not table or item.names:
            yield f"{item.key}.name" if table else item.key


def component_names(recipe: str, key: str) -> tuple[str, ...]:
    """Returns the possible names of the component of `key` (such as `optimizer.name`)."""
    from forge_core.config.descriptions import explain

    outcome, registry = _resolution(recipe)
    component = key.removesuffix(".name")
    known = component != key and component in outcome.fields
    return explain(outcome, registry, component)[0].names if known else ()


def _resolution(recipe: str | None) -> "tuple[Resolution, Registry]":
    """Resolves a recipe, faults included, or the defaults if the file cannot be read: unfinished recipes need completion, too."""
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
    """Checks that a command runs in one process.

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
