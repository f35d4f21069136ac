"""`forge-train evaluate CHECKPOINT`: loss on held-out sets."""

import os
from pathlib import Path
from typing import Annotated

import typer

from forge_core.terminal.console import Console


def evaluate(
    context: typer.Context,
    checkpoint: Annotated[Path, typer.Argument(help="A run's directory, a checkpoint, or a Hugging Face folder.")],
    recipe: Annotated[
        str | None, typer.Option("--recipe", help="Take all sections but the model from this recipe.", show_default=False)
    ] = None,
    weights: Annotated[str, typer.Option(help="Whose weights: `model`, or `ema` for the average that hook ema kept.")] = "model",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
) -> None:
    """Evaluate a checkpoint on held-out sets: those of its recipe, or others by --data.evaluation.NAME.name=text ...

    Runs as one process or under torchrun, on any layout: --parallel.tp=2. The result does not depend on the number of processes.
    """
    from dataclasses import asdict

    from forge_core.registry import Registry
    from forge_parallel.launch import process_group
    from forge_parallel.launch.environment import read_launcher
    from forge_train.commands.on_ranks import on_ranks
    from forge_train.inference.evaluate import recipe_for, scores
    from forge_train.inference.open import open_weights

    registry, where, console = Registry(), read_launcher(os.environ), Console(as_json=as_json)
    first = where.rank == 0

    def evaluated() -> None:
        opened = open_weights(checkpoint, registry, weights)
        resolved = recipe_for(opened, recipe, context.args, where.size, registry)
        device = process_group.start(where, resolved.job.parallel.timeout)
        found = []
        for score in scores(opened, resolved, device, registry, console.note if first else lambda _: None):
            found.append(asdict(score))
            if first and not as_json:
                bits = f"  {score.bits_per_byte:.4f} bits per byte" if score.bits_per_byte is not None else ""
                numbers = f"loss {score.loss:.4f}  perplexity {score.perplexity:.2f}{bits}"
                console.text(f"{score.name}: {numbers}  {score.tokens:,} tokens")
        if first and as_json:
            console.document({"checkpoint": opened.facts.origin, "step": opened.facts.step, "sets": found})

    on_ranks(where, console, evaluated)
