"""What has to be known of plain tensors: which model they are of, and whether they are all of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from forge_core.component import Component
from forge_core.errors import ForgeError
from forge_core.protocols.weights import StoredTensor, Weights, WeightsInfo
from forge_core.registry import Registry
from forge_train.inference.forge_weights import job_of, table_of
from forge_train.recipe.load import load

_SHOWN = 20


def describe(weights: Weights) -> dict[str, Any]:
    """The model and the facts of weights as JSON, to be written next to their tensors."""
    facts = weights.facts
    return {
        "model": table_of(weights.model, Registry()),
        "step": facts.step,
        "special_tokens": dict(facts.special_tokens),
        "ends": list(facts.ends),
        "family": facts.family,
        "origin": facts.origin,
        "notes": list(facts.notes),
    }


def model_of(description: Mapping[str, Any] | None, recipe: str | None, origin: Path) -> Component:
    """The model of a recipe, where one is given, else that of a description.

    Raises:
        ForgeError: there is neither; or a description names a Python file, which does not run unasked.
    """
    if recipe is not None:
        return load(recipe, registry=Registry()).job.model
    if description is None or "model" not in description:
        raise ForgeError(f"{origin} does not say which model its tensors are of; pass --recipe with a [model] that fits")
    return job_of({"config": {"model": description["model"]}}, Registry(), "model", origin=str(origin)).model


def facts_of(description: Mapping[str, Any] | None, origin: Path, tokenizer: Path, notes: tuple[str, ...] = ()) -> WeightsInfo:
    """The facts of a description; `tokenizer` is the folder of its files, where it exists."""
    given = description or {}
    return WeightsInfo(
        step=given.get("step", 0),
        special_tokens=dict(given.get("special_tokens", {})),
        ends=tuple(given.get("ends", ())),
        family=given.get("family", ""),
        origin=str(origin),
        tokenizer=tokenizer if tokenizer.is_dir() else None,
        notes=(*given.get("notes", ()), *notes),
    )


def check_fit(component: Any, tensors: Mapping[str, StoredTensor], origin: Path) -> None:
    """Compares names and shapes with the model. A buffer may be missing, since it begins as in a new run.

    Raises:
        ForgeError: one error with the tensors that are missing, left over or of another shape, the first 20 of each.
    """
    with torch.device("meta"):
        module: torch.nn.Module = component.build()
    ties = dict(module.specs().ties)  # type: ignore[operator] (a model of Forge has it)
    parameters = {name: tuple(tensor.shape) for name, tensor in module.named_parameters() if name not in ties}
    held = parameters | {name: tuple(tensor.shape) for name, tensor in module.named_buffers()}
    kinds = [
        [
            f"{name}: shape {entry.shape}, in the model {held[name]}"
            for name, entry in tensors.items()
            if name in held and entry.shape != held[name]
        ],
        [f"{name}: missing" for name in parameters if name not in tensors],
        [f"{name}: not in the model" for name in tensors if name not in held],
    ]
    if any(kinds):
        listed = [line for faults in kinds for line in _cut(faults)]
        raise ForgeError("\n  ".join([f"the tensors in {origin} do not fit the model:", *listed]))


def _cut(faults: list[str]) -> list[str]:
    more = len(faults) - _SHOWN
    return faults if more <= 0 else [*faults[:_SHOWN], f"and {more} more: {faults[-1].rpartition(': ')[2]}"]
