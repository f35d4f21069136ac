"""Evaluates stored weights (a run, a checkpoint or a Hugging Face folder) on held-out sets, in any layout."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from forge_ckpt.world import ProcessGroupWorld, SingleProcessWorld
from forge_core.config.tree import Table, build
from forge_core.errors import DataError, ForgeError
from forge_core.protocols.weights import Weights
from forge_core.redaction import refuse_redacted
from forge_core.registry import Registry
from forge_data.loading.evaluation import evaluation
from forge_parallel.step.step import Step
from forge_train.directory import run_directory
from forge_train.formats.forge import ForgeWeights, table_of
from forge_train.hooks.evaluation import bits_per_byte, evaluated, perplexity
from forge_train.inference.stored import load_sharded_model
from forge_train.inference.tokenizer import tokenizer_for
from forge_train.process.ranks import rank_zero_first
from forge_train.recipe.load import Recipe, load_recipe
from forge_train.run.reference import stored_reference
from forge_train.run.teacher import taught

_SECTIONS = ("job", "model", "data", "train", "precision", "schedule", "objective", "transforms")
"""Sections that determine the loss; hooks, checkpoints and the layout of the training run do not."""


@dataclass(frozen=True)
class Score:
    """The result of one held-out set.

    Attributes:
        loss: nats per predicted token.
        perplexity: exp(loss).
        bits_per_byte: bits per byte of the text of the predicted tokens; None if the size of the text is unknown.
        tokens: number of predicted tokens.
        metrics: means of the objective's own metrics, such as the accuracy, by name; empty for the perplexity.
    """

    name: str
    loss: float
    perplexity: float
    bits_per_byte: float | None
    tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict)


def recipe_for(weights: Weights, recipe: str | None, overrides: Sequence[str], world: int, registry: Registry) -> Recipe:
    """Returns the recipe for evaluating weights: their own recipe or another one, always with the weights' own model.

    Args:
        weights: the weights to evaluate.
        recipe: recipe with the held-out sets; None uses the recipe of the weights.
        overrides: `--section.key=value`; by default, all ranks are data ranks.
        world: number of processes.
        registry: where components are found.

    Raises:
        ForgeError: there is no recipe, or the recipe has faults or no [data.evaluation].
    """
    origin = weights.facts.origin if recipe is None else recipe
    values: dict[str, Any] = dict(weights.facts.recipe) if recipe is None else load_recipe(recipe, (), None, registry).as_json()
    if "data" not in values:
        raise ForgeError(f"{origin} has no recipe with [data]; pass --recipe RECIPE")
    chosen = {name: values[name] for name in _SECTIONS if name in values}
    refuse_redacted({"data": chosen["data"]}, origin)
    chosen["model"] = table_of(weights.model, registry)
    chosen["data"] = {**chosen["data"], "phases": []}
    micro_batch = chosen["train"]["micro_batch"]
    chosen["train"] = {**chosen["train"], "global_batch": micro_batch * world}
    tree = build(chosen, (), lambda _: origin, Path.cwd())
    assert isinstance(tree, Table)
    resolved = load_recipe(tree, overrides, world, registry)
    if not resolved.job.data.evaluation:
        raise ForgeError(
            f"{origin} has no held-out set; add a set, such as --data.evaluation.mine.name=text "
            "--data.evaluation.mine.path=FILE, or pass another recipe with --recipe"
        )
    return resolved


def scores(
    weights: Weights, recipe: Recipe, device: torch.device, registry: Registry, say: Callable[[str], None]
) -> Iterator[Score]:
    """Collective: evaluates the held-out sets of the recipe one after the other; every rank gets the same results.

    Raises:
        ForgeError: a set cannot be read or has another tokenizer, or the weights do not fit the model.
    """
    job, layout = recipe.job, recipe.layout
    assert layout is not None
    with rank_zero_first(ProcessGroupWorld() if layout.world > 1 else SingleProcessWorld()):
        try:
            tokenizer = tokenizer_for(weights, None, registry, say)
        except DataError:
            tokenizer = None  # the weights were trained on token ids, or their data no longer exists here
        workspace = (weights.facts.run or run_directory(job)) / "data"
        vocab_size = getattr(job.model, "vocab_size", None)
        shape: dict[str, Any] = {"workspace": workspace, "vocab_size": vocab_size, "model": job.model, "report": say}
        shape["pairs"] = getattr(job.objective, "pairs", False)
        sets = evaluation(job.data, tokenizer=tokenizer, **shape)
    model = load_sharded_model(weights, recipe, device, registry)
    objective: Any = job.objective.build()
    if hasattr(objective, "with_reference"):
        if not isinstance(weights, ForgeWeights):
            raise ForgeError(f"{weights.facts.origin} is no checkpoint of a run, so it has no reference; evaluate the run")
        objective = stored_reference(objective, workspace, weights.meta)
    if hasattr(objective, "with_teacher"):
        objective = taught(objective, job, model.topology, registry, tokenizer, [held_out.source for held_out in sets.values()])
    topology, step = model.topology, Step(model, objective)
    for name, held_out in sets.items():
        names = evaluated(job.objective)
        result = step.evaluate(held_out.batches(topology.data_rank, topology.data_size, job.train.micro_batch), metrics=names)
        metrics = {name: result.metrics[name] / max(result.tokens, 1) for name in names}
        known = None if names else held_out.predicted()  # losses of other kinds are no bits of the text
        per_byte = bits_per_byte(result.loss, *known) if known is not None and known[1] > 0 else None
        yield Score(name, result.loss, perplexity(result.loss), per_byte, result.tokens, metrics)
