"""The frozen base of an adapter: where it is, and whether it is the one that the adapter was trained on."""

from pathlib import Path
from typing import Any

from forge_core.errors import ForgeError
from forge_core.protocols.weights import Weights
from forge_core.registry import Registry
from forge_models.lora_weights import Parts
from forge_train.formats.converters import format_of
from forge_train.recipe.load import FROM_HF, FROM_HF_IGNORE
from forge_train.recipe.schema import Start

BASE = "base"
"""Key of a checkpoint's metadata with the identity of the base: `sha256` of its tensors, and `origin`, where it was."""

_WHOLE = Start()


def open_base(model: Any, start: Start, registry: Registry, elsewhere: str | None = None) -> Weights:
    """Opens the base of a model with an adapter, from `[model] from_hf` or `folder`, or from `[start]`, and compares its tensors
    with the model.

    Args:
        model: the model's component, which has `lora`.
        start: the section `[start]`.
        registry: where converters are found.
        elsewhere: where the base is instead; None: where the recipe says.

    Raises:
        ForgeError: the recipe names no base, it is missing, or it has other tensors.
    """
    reopened = getattr(model, "reopened", None)  # of a class of transformers, whose tensors have names of its own
    key = FROM_HF if reopened is None else "folder"
    folder = getattr(model, key, None) if reopened is None or model.weights_from == "folder" else None
    path = elsewhere or folder or start.weights
    if path is None:
        raise ForgeError(
            "[model.lora] adapts a base, and the recipe names none: set "
            f"model.{key} to a folder in the Hugging Face format, or start.weights to a run or checkpoint"
        )
    if folder is not None and start.weights is not None:
        raise ForgeError(f"model.{key} and start.weights are two bases for [model.lora]; remove one of them")
    for name in ("include", "exclude", "rename", "draw"):
        if getattr(start, name) != getattr(_WHOLE, name):
            raise ForgeError(f"start.{name} selects parts of weights, but [model.lora] needs its whole base; remove the key")
    options: dict[str, Any] = {}
    kind = format_of(path)
    if kind == "hf":
        options = {"ignore": getattr(model, FROM_HF_IGNORE, ())}
    elif kind == "forge" and elsewhere is None and start.section != "model":
        options = {"weights": start.section}
    try:
        if kind == "hf" and reopened is not None:
            weights = reopened(Path(path))
        else:
            weights = registry.load("forge.converters", kind)(**options).build().read(Path(path))
    except (ForgeError, OSError) as cause:
        raise ForgeError(
            f"the base of the adapter cannot be opened at {path}: {cause}. Put it back, or name its new place: "
            f"{'model.' + key if folder is not None else 'start.weights'} in a recipe, --base in `forge-train convert`"
        ) from cause
    if getattr(weights.model, "lora", None) is not None:
        raise ForgeError(
            f"{path} has an adapter of its own, so it cannot be a base; merge it first: forge-train convert {path} TARGET "
            "--merge --to forge"
        )
    Parts(model).check_base(weights)
    return weights
