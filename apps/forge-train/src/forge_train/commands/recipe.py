"""`forge-train check|config|prepare RECIPE`: commands that read a recipe without training. No torch."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from forge_core.config.changes import Change, changes
from forge_core.config.toml import read_toml
from forge_core.config.tree import Table, build
from forge_core.config.validation import Resolution, walk
from forge_core.errors import CheckpointError, ForgeError
from forge_core.registry import Registry
from forge_core.terminal import Console
from forge_train.commands.options import OverridesCommand, RecipePath
from forge_train.recipe.load import load_recipe
from forge_train.recipe.schema import Job


def check(
    context: typer.Context,
    recipe: RecipePath,
    world: Annotated[int, typer.Option("--world", help="World size: the number of processes of the run.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a recipe for a world of N processes and report every fault; imports no torch."""
    from forge_parallel.checks import left_to_the_start

    registry = Registry()
    console = Console(as_json=as_json)
    resolved = load_recipe(recipe, context.args, world, registry)
    warnings = list(resolved.warnings)
    if resolved.job.precision.compute == "bf16":
        from forge_core.machine import slow_bf16

        if slow := slow_bf16():
            warnings.append(f"precision.compute = 'bf16': {slow}; set 'fp32' to train on it")
    for warning in warnings:
        console.note(f"warning: {warning}")
    depends = list(getattr(resolved.job.model, "layout_dependent", ()))
    for key in depends:
        console.note(f"note: the effect of {key} depends on the number of ranks and on train.micro_batch")
    if left := left_to_the_start(resolved.job, resolved.layout):
        console.note(f"note: the start of a run checks whether the model fits {', '.join(left)}, when it has built the model")
    if as_json:
        console.document(
            {
                "ok": True,
                "recipe": recipe,
                "world": world,
                "layout": str(resolved.layout),
                "used": registry.used(resolved.used),
                "warnings": warnings,
                "layout_dependent": depends,
                "faults": [],
            }
        )
        return
    sizes = resolved.layout.sizes() if resolved.layout else {}
    console.text(f"{recipe}: no fault for {world} process{'es' if world != 1 else ''}")
    console.text("layout: " + ", ".join(f"{axis} {size}" for axis, size in sizes.items()))
    console.text(
        f"components: {len(resolved.used)} of " + ", ".join(sorted({e["distribution"] for e in registry.used(resolved.used)}))
    )


config = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Show recipes, explain keys, compare, and print a schema for editors.",
)

_OPEN = {"allow_extra_args": True, "ignore_unknown_options": True}
_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@config.command(cls=OverridesCommand, context_settings=_OPEN)
def show(
    context: typer.Context,
    recipe: RecipePath,
    origins: Annotated[bool, typer.Option("--origins", help="Show where each value comes from.")] = False,
    as_json: _Json = False,
) -> None:
    """Show the resolved recipe: layers merged, defaults filled in. Any key can be set: --optimizer.lr=1e-3"""
    from forge_core.redaction import redacted, redacted_text

    console = Console(as_json=as_json)
    resolved = load_recipe(recipe, context.args)
    text = resolved.as_toml(origins=origins).rstrip("\n")
    if redacted_text(text) != text:
        console.note("secrets are hidden, so the recipe shown here does not load to the same run")
    if as_json:
        rows = [row | {"value": redacted(row["value"], row["key"])} for row in resolved.origins()]
        console.document({"recipe": redacted(resolved.as_json())} | ({"origins": rows} if origins else {}))
    else:
        console.text(redacted_text(text))


@config.command(cls=OverridesCommand, context_settings=_OPEN)
def explain(
    context: typer.Context,
    recipe: RecipePath,
    key: Annotated[str, typer.Argument(help="A key such as optimizer.lr, or a section.", show_default=False)] = "",
    as_json: _Json = False,
) -> None:
    """Explain a key: type, range, default, value and origin. A section, or no key at all, explains all keys in it."""
    from forge_core.config.descriptions import explain as explain_key
    from forge_core.config.toml import value_text
    from forge_core.redaction import redacted

    console = Console(as_json=as_json)
    registry = Registry()
    overrides = list(context.args)
    if key.startswith("-"):  # an override: the argument KEY is optional
        overrides, key = [key, *overrides], ""
    resolved = load_recipe(recipe, overrides, None, registry)
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

    Shows the class of each key: for example, a resume refuses to change an `identity` key. Overrides such as
    --optimizer.lr=1e-3 apply to the second side.
    """
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
    as_json: Annotated[bool, typer.Option("--json", help="The output is always JSON.", hidden=True)] = False,
) -> None:
    """Print the JSON Schema of a recipe with every installed component, for editors that complete TOML."""
    from forge_core.config.descriptions import json_schema

    document = json_schema(Job, Registry())
    if output is None:
        Console().document(document)
        return
    try:
        output.write_text(json.dumps(document, indent=2) + "\n")
    except OSError as cause:
        raise ForgeError(f"the schema cannot be written to {output}: {cause.strerror}; choose another --output") from cause
    console = Console(as_json=as_json)
    if as_json:
        console.document({"output": str(output)})
    console.text(f"wrote {output}")


def prepare(
    context: typer.Context,
    recipe: RecipePath,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
) -> None:
    """Tokenize the text of a recipe before its run starts.

    A run does the same at its start. On a cluster, run this once before, in one process, so that no accelerator waits.
    """
    from forge_core.protocols.data import StreamedSource
    from forge_data.loading.evaluation import evaluation
    from forge_data.loading.sources import LoadSpec, context_of, open_sources
    from forge_train.directory import claim, run_directory

    console = Console(as_json=as_json)
    job = load_recipe(recipe, context.args, None, Registry()).job
    directory = run_directory(job)
    claim(directory)
    workspace = directory / "data"
    vocab_size = getattr(job.model, "vocab_size", None)
    spec = LoadSpec(job.data, workspace, vocab_size=vocab_size, model=job.model)
    opened = open_sources(spec, context_of(spec, console.note))
    known: dict[str, Any] = {"vocab_size": vocab_size, "model": job.model, "pairs": getattr(job.objective, "pairs", False)}
    held_out = evaluation(job.data, workspace=workspace, report=console.note, **known)
    found: dict[str, Any] = {
        "workspace": str(workspace),
        "sources": {label: source.tokens for label, source in opened.sources.items() if not isinstance(source, StreamedSource)},
        "evaluation": {label: entry.tokens for label, entry in held_out.items()},
    }
    if as_json:
        console.document(found)
    rows = [(kind, label, f"{tokens:,}") for kind in ("sources", "evaluation") for label, tokens in found[kind].items()]
    console.table(("kind", "name", "tokens"), rows)


def differences(one: str, other: str, overrides: Sequence[str] = (), registry: Registry | None = None) -> list[Change]:
    """Returns every key whose value differs, defaults included, with its class (what a resume does if the key changes).

    Args:
        one, other: a TOML file, the name of a preset, a run's directory, a checkpoint, or a directory of checkpoints.
        overrides: `--section.key=value`, applied to the second side, which must be a recipe or a run then.

    Raises:
        ForgeError: a side cannot be read, or a recipe has faults.
    """
    registry = registry or Registry()
    return changes(_outcome(one, (), registry), _outcome(other, overrides, registry), registry)


def _outcome(given: str, overrides: Sequence[str], registry: Registry) -> Resolution:
    from forge_train.directory import RECIPE

    path = Path(given)
    if path.is_dir() and (path / RECIPE).is_file():
        return load_recipe(read_toml(path / RECIPE), overrides, None, registry).outcome
    if path.is_dir() and not overrides and not any(path.glob("*.toml")):
        return _recorded(path, registry)
    return load_recipe(given, overrides, None, registry).outcome


def _recorded(path: Path, registry: Registry) -> Resolution:
    """Resolves the recipe in a checkpoint."""
    from forge_ckpt.checkpoint.locate import locate

    place = locate(path)
    tree = build(place.manifest().meta.get("config", {}), (), lambda _: f"{place.store.root}/{place.name}", Path.cwd())
    if not isinstance(tree, Table) or not tree.items:
        raise CheckpointError(f"{place.store.root}/{place.name} has no recipe to compare; compare with a checkpoint of a run")
    return walk(Job, tree, registry)
