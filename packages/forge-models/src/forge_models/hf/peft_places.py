"""Where the adapters of a model are in the format of the peft library: modules by the names that the base has in transformers."""

from dataclasses import dataclass, replace

import torch

from forge_core.errors import ForgeError
from forge_models.base_format import TUNED
from forge_models.components.decoder import DecoderConfig
from forge_models.components.lora import LoRAConfig
from forge_models.components.transformers import TransformersConfig
from forge_models.hf.families import FAMILIES
from forge_models.hf.names import TensorPlace, places_in
from forge_models.hf.writer import chosen

AdaptedModel = DecoderConfig | TransformersConfig
ATTENTION = ".attention."
"""Part of the names of the matrices of attention of a decoder."""


@dataclass(frozen=True)
class AdapterPlace:
    """Where the adapter of a matrix is in the format.

    Attributes:
        module: path of the base's module in the Hugging Face format.
        part: number of the matrix among the `parts` that the module fuses.
        first, rows: rows of the module's B, and of its magnitude, that belong to the matrix.
        total: number of all rows.
        order: row i of our B is row order[i] of the format's; empty = the same order.
    """

    module: str
    part: int
    parts: int
    first: int
    rows: int
    total: int
    order: tuple[int, ...] = ()


def kind_of(model: AdaptedModel, family: str, wanted: str | None = None) -> str:
    """Returns the family whose names a base has: `family` if there is one of this name, else the first that describes the model,
    or `wanted`. Empty for a class of transformers, which has names of its own.

    Raises:
        Unsupported: no family describes the model.
    """
    if isinstance(model, TransformersConfig):
        return ""
    return family if family in FAMILIES else chosen(model, wanted).model_type


def every_place(model: AdaptedModel, family: str) -> dict[str, AdapterPlace]:
    """Returns {name: place} of all matrices of a model whose adapters the format can express."""
    if isinstance(model, TransformersConfig):
        return _layers_of(model)
    names = tuple(name for name in model.shape.matrices()[0] if model.moe is None or ATTENTION in name)
    return _places_in_family(replace(model, lora=LoRAConfig(targets=names)), family)


def places_of(model: AdaptedModel, family: str) -> dict[str, AdapterPlace]:
    """Returns {name of each adapted matrix: its place}.

    Raises:
        ForgeError: the format cannot express the adapter of a matrix.
    """
    if not isinstance(model, TransformersConfig):
        return _places_in_family(model, family)
    with torch.device("meta"):
        module = model.build()
    names = [path for path, part in module.named_modules() if getattr(part, "adapter", ())]
    layers = _layers_of(replace(model, lora=None))
    if stacks := [name for name in names if name not in layers]:
        raise ForgeError(
            f"the format 'peft' has no adapters of stacked experts, such as those of {stacks[0]}; write the merged model "
            "instead: forge-train convert SOURCE TARGET --to hf"
        )
    return {name: layers[name] for name in names}


def whole_modules(model: AdaptedModel, family: str) -> dict[str, str]:
    """Returns {name: module} of the parameters that an adapter may have whole (`LoRAConfig.train`); none of a class of
    transformers."""
    if isinstance(model, TransformersConfig):
        return {}
    places = places_in(FAMILIES[family], model)
    return {
        name: FAMILIES[family].module(places[name].names[0].removesuffix(".weight")) for name in TUNED.values() if name in places
    }


def _layers_of(model: TransformersConfig) -> dict[str, AdapterPlace]:
    from forge_models.hf.causal_lm_lora import linear_layers

    with torch.device("meta"):
        module = model.build()
    rows = {path: module.get_submodule(path).out_features for path in linear_layers(module)}
    return {path: AdapterPlace(path, 0, 1, 0, count, count) for path, count in rows.items()}  # type: ignore[arg-type]


def _places_in_family(model: DecoderConfig, family: str) -> dict[str, AdapterPlace]:
    lora = model.lora
    assert lora is not None, "the caller has looked"
    plain = replace(model, lora=None)
    hidden, experts = plain.shape.matrices()
    names = lora.matched([*hidden, *experts])
    # In a model with experts, the peft library takes every feed-forward layer for one of the fused experts of transformers.
    if plain.moe is not None and (others := [name for name in names if ATTENTION not in name]):
        raise ForgeError(
            f"the format 'peft' has no adapters of experts and of layers beside them, such as {others[0]}; write the merged "
            "model instead: forge-train convert SOURCE TARGET --to hf"
        )
    places = places_in(FAMILIES[family], plain)
    by_module: dict[str, list[str]] = {}
    for name in hidden:
        by_module.setdefault(places[f"{name}.weight"].names[0], []).append(name)
    found = {}
    for name in names:
        place: TensorPlace = places[f"{name}.weight"]
        if place.fused is not None and place.rows:
            raise ForgeError(
                f"{place.names[0]} has the rows of {name} between those of others, so the format 'peft' cannot hold its adapter; "
                "write the merged model instead: forge-train convert SOURCE TARGET --to hf"
            )
        module, rows = place.names[0], place.shape[0]
        first, total = (0, rows) if place.fused is None else place.fused[1:]
        fused = by_module[module]
        ordered = sorted(fused, key=lambda other: 0 if (at := places[f"{other}.weight"].fused) is None else at[1])
        found[name] = AdapterPlace(
            FAMILIES[family].module(module.removesuffix(".weight")),
            ordered.index(name),
            len(fused),
            first,
            rows,
            total,
            tuple(place.rows),
        )
    return found
