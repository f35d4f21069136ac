"""`forge-train prepare RECIPE`: tokenizes the data ahead of the run."""

from typing import Annotated, Any

import typer

from forge_core.terminal import Console
from forge_train.commands.completion import Recipe


def prepare(
    context: typer.Context,
    recipe: Recipe,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
) -> None:
    """Tokenize the text of a recipe before its run starts.

    A run does the same at its start. On a cluster, do it once before, in one process, so that no accelerator waits.
    """
    from forge_core.protocols.data import StreamedSource
    from forge_core.registry import Registry
    from forge_data.loading.loader import evaluation
    from forge_data.loading.open_sources import context_of, open_sources
    from forge_data.loading.spec import LoadSpec
    from forge_train.directory import claim, run_directory
    from forge_train.recipe.load import load

    console = Console(as_json=as_json)
    job = load(recipe, context.args, None, Registry()).job
    directory = run_directory(job)
    claim(directory)
    workspace = directory / "data"
    vocab_size = getattr(job.model, "vocab_size", None)
    spec = LoadSpec(job.data, workspace, vocab_size=vocab_size, model=job.model)
    opened = open_sources(spec, context_of(spec, console.note))
    held_out = evaluation(job.data, workspace=workspace, report=console.note, vocab_size=vocab_size, model=job.model)
    found: dict[str, Any] = {
        "workspace": str(workspace),
        "sources": {label: source.tokens for label, source in opened.sources.items() if not isinstance(source, StreamedSource)},
        "evaluation": {label: entry.tokens for label, entry in held_out.items()},
    }
    if as_json:
        console.document(found)
    rows = [(kind, label, f"{tokens:,}") for kind in ("sources", "evaluation") for label, tokens in found[kind].items()]
    console.table(("kind", "name", "tokens"), rows)
