"""The decoder of a model with images, as what a family of text models says and holds of it."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from forge_core.protocols.weights import Weights
from forge_models.components.decoder import DecoderConfig
from forge_models.hf.config import Unsupported
from forge_models.hf.family import Family
from forge_models.hf.names import Place, places_in
from forge_models.hf.writer import chosen
from forge_vlm.components.model import VLM


def decoder_of(model: VLM) -> DecoderConfig:
    """The text model that is left of a model without images."""
    return DecoderConfig(**{item.name: getattr(model, item.name) for item in fields(DecoderConfig)})


def family_of(model: VLM) -> Family:
    """The first family that says all that the decoder is.

    Raises:
        Unsupported: none does; names per family what it cannot say.
    """
    return chosen(decoder_of(model), None)


def text_misfits(model: VLM) -> list[str]:
    """Why no family of text models can say what the decoder is; empty when one can."""
    try:
        family_of(model)
    except Unsupported as cause:
        return str(cause).splitlines()
    return []


def text_places(family: Family, decoder: DecoderConfig, prefix: str) -> dict[str, Place]:
    """Global name -> place of every tensor of the decoder; their names begin with `prefix`."""
    places = places_in(family, decoder)
    return {name: replace(place, names=tuple(prefix + theirs for theirs in place.names)) for name, place in places.items()}


def tilers(weights: Weights) -> list[str]:
    """The tilers by which the run behind weights cut images, `square` aside."""
    data = weights.facts.recipe.get("data") or {}
    sources = data.get("sources") or () if isinstance(data, Mapping) else ()
    tilings: list[Any] = [source.get("tiling") or {} for source in sources if isinstance(source, Mapping)]
    return sorted({tiling.get("name", "square") for tiling in tilings} - {"square"})
