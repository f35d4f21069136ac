"""`forge-train upcycle SOURCE RECIPE TARGET`: a dense model's weights as those of a model with experts."""

from pathlib import Path
from typing import Annotated, Any

import typer


def upcycle(
    source: Annotated[Path, typer.Argument(help="A run, a checkpoint, or a Hugging Face folder of a dense model.")],
    recipe: Annotated[str, typer.Argument(help="A TOML file or preset whose [model.moe] describes the new model.")],
    target: Annotated[Path, typer.Argument(help="The folder to create.")],
    to: Annotated[str, typer.Option("--to", help="Format of TARGET.")] = "hf",
    noise: Annotated[float, typer.Option(min=0.0, help="Noise added to experts, in standard deviations of each matrix.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of noise and routers.")] = 0,
) -> None:
    """Turn the feed-forward parts of a dense model into experts; without noise the new model computes the same.

    Start a run from a folder in the Hugging Face format with `[model] from_hf`.
    """
    from forge_core.errors import ForgeError
    from forge_core.registry import Registry
    from forge_core.terminal import Console
    from forge_core.trust import trust_name
    from forge_models.moe.upcycle import Upcycled
    from forge_train.commands.single_process import require_single_process
    from forge_train.inference.stored import open_weights
    from forge_train.recipe.load import load

    require_single_process("upcycle")
    registry = Registry()
    model: Any = load(recipe, registry=registry).job.model
    if getattr(model, "moe", None) is None:
        raise ForgeError(f"{recipe} has no [model.moe], which defines the experts")
    console, given = Console(), open_weights(source, registry)
    for note in given.facts.notes:
        console.note(note)
    weights = Upcycled(given, model.moe, noise, seed)
    trust_name(to)
    registry.load("forge.converters", to)().build().write(target, weights)
    shape = weights.model.shape
    assert shape.moe is not None
    layers = sum(map(shape.has_experts, range(shape.layers)))
    console.text(
        f"{target}: {layers} of {shape.layers} layers with {shape.moe.experts} experts, {shape.moe.top_k} for each token"
    )
