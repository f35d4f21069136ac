"""`forge-train evaluate CHECKPOINT`: loss on held-out sets, or results of tasks of the LM Evaluation Harness."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from forge_core.terminal import Console


def evaluate(
    context: typer.Context,
    checkpoint: Annotated[
        str, typer.Argument(help="A run's directory, a checkpoint, or the URL of one of them; or a Hugging Face folder.")
    ],
    recipe: Annotated[
        str | None, typer.Option("--recipe", help="Recipe for all sections except the model.", show_default=False)
    ] = None,
    weights: Annotated[str, typer.Option(help="Weights to use: `model`, or `ema` for the average of hook ema.")] = "model",
    tasks: Annotated[
        str | None, typer.Option(help="Tasks of the LM Evaluation Harness, separated by commas, instead of held-out sets.")
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Folder with your own task files.")] = None,
    shots: Annotated[int | None, typer.Option(help="Examples before each question. Default: as the task says.")] = None,
    limit: Annotated[int | None, typer.Option(help="Maximum number of questions per task.")] = None,
    batch: Annotated[int | None, typer.Option(help="For tasks: texts per forward and process. Default: 8.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="For tasks: a tokenizer.json or sentencepiece model to use.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
) -> None:
    """Evaluate a checkpoint: on the held-out sets of its recipe or others (--data.evaluation.NAME.name=text ...), or on --tasks.

    Runs as one process or under torchrun, on any layout: --parallel.tp=2. The result does not depend on the number of processes.
    """
    from dataclasses import asdict

    from forge_core.registry import Registry
    from forge_parallel.launch import process_group
    from forge_parallel.launch.environment import read_launcher
    from forge_train.inference.evaluation import recipe_for, scores
    from forge_train.inference.stored import open_weights
    from forge_train.process.ranks import content_of, on_ranks
    from forge_train.recipe.load import load_recipe

    registry, where, console = Registry(), read_launcher(os.environ), Console(as_json=as_json)
    first = where.rank == 0

    of_tasks = {"--folder": folder, "--shots": shots, "--limit": limit, "--batch": batch, "--tokenizer": tokenizer}

    def evaluate_tasks() -> None:
        from forge_train.hooks.evaluation import import_harness
        from forge_train.inference.stored import load_sharded_model, recipe_to_generate
        from forge_train.inference.tokenizer import check_tokenizer, tokenizer_for

        names = [name for name in (tasks or "").split(",") if name]
        index = import_harness().open_tasks(names, folder)
        opened = open_weights(checkpoint, registry, weights)
        note = console.note if first else lambda _: None
        coder = tokenizer_for(opened, tokenizer, registry, note)
        check_tokenizer(coder, opened, note)
        resolved = recipe_to_generate(opened, context.args, where.size, registry)
        device = process_group.init_process_groups(
            where, resolved.job.parallel.timeout, content=lambda: content_of(resolved, registry)
        )
        model = import_harness().HarnessModel(
            load_sharded_model(opened, resolved, device, registry),
            coder,
            batch=batch or 8,
            before_all=opened.facts.special_tokens.get("bos_token_id"),
        )
        results = import_harness().results_of(model, names, index, shots, limit)
        for name, metrics in results.items() if first and not as_json else ():
            console.text(f"{name}: {'  '.join(f'{metric} {value:.4f}' for metric, value in metrics.items())}")
        if first and as_json:
            console.document({"checkpoint": opened.facts.origin, "step": opened.facts.step, "tasks": results})

    def evaluate_sets() -> None:
        if recipe is not None:
            load_recipe(recipe, (), None, registry)  # allows the recipe's Python files to run, also if the weights name them
        opened = open_weights(checkpoint, registry, weights)
        resolved = recipe_for(opened, recipe, context.args, where.size, registry)
        device = process_group.init_process_groups(
            where, resolved.job.parallel.timeout, content=lambda: content_of(resolved, registry)
        )
        sets = []
        for score in scores(opened, resolved, device, registry, console.note if first else lambda _: None):
            sets.append(asdict(score))
            if first and not as_json:
                bits = f"  {score.bits_per_byte:.4f} bits per byte" if score.bits_per_byte is not None else ""
                numbers = f"loss {score.loss:.4f}  perplexity {score.perplexity:.2f}{bits}"
                console.text(f"{score.name}: {numbers}  {score.tokens:,} tokens")
        if first and as_json:
            console.document({"checkpoint": opened.facts.origin, "step": opened.facts.step, "sets": sets})

    def body() -> None:
        _refuse_unused(tasks, recipe, of_tasks)
        evaluate_sets() if tasks is None else evaluate_tasks()

    on_ranks(where, console, body)


def _refuse_unused(tasks: str | None, recipe: str | None, of_tasks: Mapping[str, object]) -> None:
    """Refuses options without effect.

    Raises:
        ForgeError: an option would have no effect, or --tasks is empty.
    """
    from forge_core.errors import ForgeError

    if tasks is None:
        if unused := [name for name, value in of_tasks.items() if value is not None]:
            raise ForgeError(f"{', '.join(unused)} has no effect without --tasks; set --tasks, or remove the option")
    elif recipe is not None:
        raise ForgeError("--recipe (held-out sets) and --tasks (tasks with their own data) exclude each other; remove one")
    elif not [name for name in tasks.split(",") if name]:
        raise ForgeError("--tasks names no task; list tasks separated by commas, such as --tasks hellaswag,arc_easy")
