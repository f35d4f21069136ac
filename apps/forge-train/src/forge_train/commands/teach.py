"""`forge-train teach RECIPE FOLDER`: stores a teacher's most likely words for distillation."""

from pathlib import Path
from typing import Annotated

import typer

from forge_core.registry import Registry
from forge_core.terminal import Console
from forge_train.commands.options import RecipePath
from forge_train.recipe.load import load_recipe


def teach(
    context: typer.Context,
    recipe: RecipePath,
    output: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder to create.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
) -> None:
    """Run the teacher of a recipe with objective `distillation` over its data once, and store its top_k most likely words.

    Runs with `objective.stored` then read the folder, so no rank holds the teacher. This is one process.
    """
    import torch

    from forge_parallel import accelerator
    from forge_train.run.teacher import store_logits

    console, registry = Console(as_json=as_json), Registry()
    job = load_recipe(recipe, context.args, 1, registry).job
    found = store_logits(job, output, torch.device(accelerator.kind()), registry, console.note)
    if as_json:
        console.document(found)
    console.text(f"{output}: {found['top_k']} words of {found['labels']:,} labels in {found['rows']:,} rows")
    console.text(f"teacher: {found['teacher']}")
