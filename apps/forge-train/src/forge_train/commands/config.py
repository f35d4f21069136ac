"""`forge-train config show|explain|diff|schema`: show recipes, explain keys, compare, and print a schema for editors."""

import json
from pathlib import Path
from typing import Annotated

import typer

from forge_train.commands.completion import OverridesCommand, Recipe

config = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, help="Inspect recipes.")

_OPEN = {"allow_extra_args": True, "ignore_unknown_options": True}
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@config.command(cls=OverridesCommand, context_settings=_OPEN)
def show(
    context: typer.Context,
    recipe: Recipe,
    origins: Annotated[bool, typer.Option("--origins", help="Show where each value comes from.")] = False,
    as_json: _Json = False,
) -> None:
    """Show the resolved recipe: layers merged, defaults filled in. Any key can be set: --optimizer.lr=1e-3"""
    from forge_core.redaction import redacted, redacted_text
    from forge_core.terminal import Console
    from forge_train.recipe.load import load

    console = Console(as_json=as_json)
    resolved = load(recipe, context.args)
    text = resolved.as_toml(origins=origins).rstrip("\n")
    if redacted_text(text) != text:
        console.note("secrets are hidden, so what is shown does not load to the same run")
    if as_json:
        told = [row | {"value": redacted(row["value"], row["key"])} for row in resolved.origins()]
        console.document({"recipe": redacted(resolved.as_json())} | ({"origins": told} if origins else {}))
    else:
        console.text(redacted_text(text))


@config.command(cls=OverridesCommand, context_settings=_OPEN)
def explain(
    context: typer.Context,
    recipe: Recipe,
    key: Annotated[str, typer.Argument(help="A key such as optimizer.lr, or a section.", show_default=False)] = "",
    as_json: _Json = False,
) -> None:
    """Explain a key: type, range, default, value and where it comes from. Give a section, or nothing, for all its keys."""
    from dataclasses import replace

    from forge_core.config.descriptions import explain as explain_key
    from forge_core.config.toml import value_text
    from forge_core.redaction import redacted
    from forge_core.registry import Registry
    from forge_core.terminal import Console
    from forge_train.recipe.load import load

    console = Console(as_json=as_json)
    registry = Registry()
    overrides = list(context.args)
    if key.startswith("-"):  # an override, since the key may be left out
        overrides, key = [key, *overrides], ""
    resolved = load(recipe, overrides, None, registry)
    found = [replace(item, value=redacted(item.value, item.key)) for item in explain_key(resolved.outcome, registry, key)]
    if as_json:
        console.document([vars(item) for item in found])
        return
    for item in found:
        console.text(f"{item.key} = {value_text(item.value)}  [{item.origin}]")
        if item.doc:
            console.text(f"    {item.doc}")
        default = f"; default {value_text(item.default)}" if item.default is not None else ""
        console.text(f"    {item.expected}{default}; at a resume: {item.key_class}")
        if item.names:
            console.text(f"    names: {', '.join(item.names)}")


@config.command(cls=OverridesCommand, context_settings=_OPEN)
def diff(
    context: typer.Context,
    one: Annotated[str, typer.Argument(help="A recipe, a run's directory, or a checkpoint.", show_default=False)],
    other: Annotated[str, typer.Argument(help="The recipe, run or checkpoint to compare with.", show_default=False)],
    as_json: _Json = False,
) -> None:
    """List keys that differ between two recipes, runs or checkpoints, defaults included; exit code 1 when any differ.

    Each has its class: a resume refuses another value of an `identity` key. Overrides such as --optimizer.lr=1e-3 change the
    second side.
    """
    from dataclasses import asdict

    from forge_core.terminal import Console
    from forge_train.recipe.compare import differences

    found = differences(one, other, context.args)
    console = Console(as_json=as_json)
    if as_json:
        console.document([asdict(change) for change in found])
    else:
        for change in found:
            console.text(f"{change}  [{change.key_class}]")
        console.text(f"{len(found)} keys differ" if found else "no difference")
    if found:
        raise typer.Exit(1)


@config.command()
def schema(
    output: Annotated[Path | None, typer.Option("--output", help="Write the schema to this file.", show_default=False)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The output is always JSON.", hidden=True)] = False,  # noqa: ARG001
) -> None:
    """Print the JSON Schema of a recipe with every installed component, for editors that complete TOML."""
    from forge_core.config.descriptions import json_schema
    from forge_core.errors import ForgeError
    from forge_core.registry import Registry
    from forge_core.terminal import Console
    from forge_train.recipe.schema import Job

    made = json_schema(Job, Registry())
    if output is None:
        Console().document(made)
        return
    try:
        output.write_text(json.dumps(made, indent=2) + "\n")
    except OSError as cause:
        raise ForgeError(f"the schema cannot be written to {output}: {cause.strerror}; choose another --output") from cause
    Console().text(f"wrote {output}")
