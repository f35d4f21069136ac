"""Starting a run from given weights: `[model] from_hf` or `[start]`. The step count is 0, the optimizer is new."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from forge_core.component import fields_of
from forge_core.errors import ForgeError
from forge_core.registry import Registry
from forge_parallel.build.parallel_model import ParallelModel
from forge_parallel.build.realize import initialize
from forge_train.inference.stored import fill_from
from forge_train.recipe.load import IGNORE, KEY
from forge_train.recipe.schema import Job
from forge_train.run.weights.warm_start import warm_start


def initial_weights(job: Job, registry: Registry, report: Callable[[str], None]) -> Callable[[ParallelModel], None] | int:
    """What `realize` takes as its source: the seed, or what loads weights where the recipe has some.

    `report` is told what of them was ignored or left out.

    Raises:
        ForgeError: the recipe has two sources of weights.
    """
    component: Any = job.model
    path = getattr(component, KEY, None)
    parts = weighted_parts(component)
    if parts and path is not None:
        raise ForgeError(
            f"model.{KEY} and the weights of model.{next(iter(parts))} are two sources of weights, and which tensor is whose is "
            "not known; remove one of them"
        )
    if job.start.weights is not None:
        if path is not None:
            raise ForgeError(f"model.{KEY} and start.weights are two sources of weights; remove one of them")
        started = warm_start(job.start, job.job.seed, registry, report, component, tuple(parts))
        return partial(_fill_with_parts, parts=parts, others=started, report=report)
    if parts:
        return partial(_fill_with_parts, parts=parts, others=partial(initialize, seed=job.job.seed), report=report)
    if path is None:
        return job.job.seed

    def restore(model: ParallelModel) -> None:
        converter = registry.load("forge.converters", "hf")(ignore=getattr(component, IGNORE, ())).build()
        weights = converter.read(Path(path))
        for note in weights.facts.notes:
            report(f"{path}: {note}")
        fill_from(weights, model)

    return restore


def weighted_parts(model: Any) -> dict[str, Any]:
    """Parts of a model that come with weights, by the name of their field, which is that of their module: components that answer
    `weights()` with a `forge_core.protocols.weights.Weights`."""
    fields = fields_of(type(model)) if dataclasses.is_dataclass(model) else ()
    return {info.name: part for info in fields if hasattr(part := getattr(model, info.name), "weights")}


@torch.no_grad()
def _fill_with_parts(
    model: ParallelModel, parts: dict[str, Any], others: Callable[[ParallelModel], None], report: Callable[[str], None]
) -> None:
    """Fills a model as `others` does, but tensors of these parts with their weights."""
    others(model)
    given = {name: part.weights() for name, part in parts.items()}
    for name, weights in given.items():
        for note in weights.facts.notes:
            report(f"model.{name}: {note}")
    for name, tensor in model.tensors():
        part, _, inner = name.partition(".")
        if part not in given:
            continue
        stored, piece = given[part].tensors.get(inner), model.piece(name, tensor)
        if stored is None or stored.shape != tuple(piece.shape):
            found = "does not have it" if stored is None else f"has the shape {stored.shape}, and not {tuple(piece.shape)}"
            raise ForgeError(f"model.{part}: {given[part].facts.origin} does not fit: of {inner} it {found}")
        if piece.local.numel():
            piece.local.copy_(given[part].box(inner, piece.offset, tuple(piece.local.shape)))
