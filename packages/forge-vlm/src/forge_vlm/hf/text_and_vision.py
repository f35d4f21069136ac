"""Vision tower and text decoder as parts of a folder in the Hugging Face format: keys, places of tensors, preprocessor.

A part that transformers cannot describe is a misfit; each misfit is one sentence for the user.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from forge_core.protocols.weights import Weights
from forge_models.components.decoder import DecoderConfig
from forge_models.hf.config import Unsupported
from forge_models.hf.family import Family
from forge_models.hf.names import TensorPlace, places_in
from forge_models.hf.writer import chosen
from forge_vlm.components.encoders import CLIP, DINOv2, Published, SigLIP
from forge_vlm.components.model import VLM
from forge_vlm.encoders.shape import VisionShape
from forge_vlm.encoders.tower_weights import their_name
from forge_vlm.encoders.towers import ACTIVATIONS, FAMILIES, TowerFamily, ffn_width, tower_fields
from forge_vlm.images.processing import RESAMPLES, Processing

if TYPE_CHECKING:
    from torch import Tensor


TOWER_READERS: Mapping[str, type[Published]] = {"clip_vision_model": CLIP, "siglip_vision_model": SigLIP, "dinov2": DINOv2}
"""`model_type` of a tower -> the encoder that reads it."""
MAX_MLP_RATIO = 64
"""Largest ratio of widths to try for DINOv2's feed-forward part, whose configuration has the ratio instead of the width."""


def tower_misfits(encoder: Any) -> list[str]:
    """Why an encoder is not a tower of transformers; empty if it is."""
    name = type(encoder).__name__
    if not isinstance(encoder, Published):
        return [f"encoder = {name}: it is not a tower of transformers; those are {', '.join(TOWER_READERS)}"]
    family = encoder.tower.family
    if family.tower not in TOWER_READERS:
        return [
            f"encoder = {name} of model_type {family.tower}: its images are patches with a mask, which this format does not have"
        ]
    try:
        again = tower_shape(tower_config(encoder), encoder.shape.outputs, encoder.shape.class_feature)
    except ValueError as cause:
        return [f"encoder = {name}: {cause}"]
    wanted = replace(encoder.shape, layers=again.layers, init_std=again.init_std)
    return [
        f"encoder = {name}: {field} = {value!r}, this format would make it {getattr(again, field)!r}"
        for field, value in vars(wanted).items()
        if value != getattr(again, field)
    ]


def tower_shape(values: Mapping[str, Any], outputs: tuple[int, ...], class_feature: bool) -> VisionShape:
    """The shape that the keys of a tower describe, with hidden states `outputs` as features."""
    family = next(family for family in FAMILIES.values() if family.tower == values["model_type"])
    fields, size = tower_fields(family, values, "vision_config")
    return VisionShape(**fields, class_feature=class_feature, image_size=size, outputs=outputs)


def tower_config(encoder: Published) -> dict[str, Any]:
    """The keys of a tower without the blocks after the last feature."""
    family, shape = encoder.tower.family, encoder.shape
    names = {ours: theirs for theirs, ours in reversed([*ACTIVATIONS.items()])}
    written: dict[str, Any] = {
        "model_type": family.tower,
        "hidden_size": shape.dim,
        "num_hidden_layers": shape.blocks,
        "num_attention_heads": shape.heads,
        "num_channels": shape.channels,
        "image_size": shape.image_size,
        "patch_size": shape.patch_size,
        "hidden_act": names[shape.activation],
        "layer_norm_eps": shape.eps,
    }
    if "num_patches" in family.defaults:
        written["num_patches"] = shape.grid**2
    if "mlp_ratio" not in family.defaults:
        more = {"vision_use_head": False} if "vision_use_head" in family.ignores else {}
        return written | {"intermediate_size": shape.ffn_dim} | more
    ratios = {ffn_width(shape.dim, ratio, shape.gated): ratio for ratio in range(MAX_MLP_RATIO, 0, -1)}
    written |= {"mlp_ratio": ratios.get(shape.ffn_dim, 0), "use_swiglu_ffn": shape.gated}
    return written | {"qkv_bias": shape.qkv_bias, "use_mask_token": False}


def tower_places(encoder: Published, prefix: str) -> dict[str, TensorPlace]:
    """Global name -> place of every tensor of the tower; their names begin with `prefix`."""
    import torch

    from forge_vlm.encoders.vit import VisionTransformer

    family, shape = encoder.tower.family, encoder.shape
    with torch.device("meta"):
        built = VisionTransformer(shape)
    found: dict[str, TensorPlace] = {}
    for name, parameter in built.named_parameters():
        rest, theirs = their_name(family, shape, name)
        size = tuple(parameter.shape)
        place = TensorPlace(size, (prefix + theirs,), reshaped=_stored_shape(family, shape, rest, size))
        if shape.gated and rest.startswith(("mlp.gate_proj", "mlp.up_proj")):
            start = 0 if rest.startswith("mlp.gate_proj") else shape.ffn_dim
            place = replace(place, fused=(0, start, 2 * shape.ffn_dim))
        found[f"encoder.{name}"] = place
    return found


def tower_constants(encoder: Published, prefix: str) -> "dict[str, Tensor]":
    """The norm after the last block if no feature is normed: transformers builds it, and nothing reads its output."""
    import torch

    if encoder.shape.last_norm:
        return {}
    family, dim = encoder.tower.family, encoder.shape.dim
    return {f"{prefix}{family.names['norm']}.{slot}": torch.full((dim,), float(slot == "weight")) for slot in ("weight", "bias")}


def unused_tensors(encoder: Published, prefix: str, layers: int) -> tuple[str, ...]:
    """Prefixes of tensors that features do not need, in a stored tower of `layers` blocks."""
    family, shape = encoder.tower.family, encoder.shape
    unused = [each for each in family.left if not (shape.last_norm and each.startswith(family.names["norm"]))]
    return tuple(prefix + each for each in (*unused, *(family.block.format(at) for at in range(shape.blocks, layers))))


def preprocessor_config(processing: Processing) -> dict[str, Any]:
    """The keys of `preprocessor_config.json`."""
    square = {"height": processing.size, "width": processing.size}
    edge = processing.shortest
    return {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": square if edge is None else {"shortest_edge": edge},
        "resample": RESAMPLES.index(processing.resample),
        "do_center_crop": edge is not None,
        "crop_size": square,
        "do_rescale": True,
        "rescale_factor": processing.scale,
        "do_normalize": True,
        "image_mean": list(processing.mean),
        "image_std": list(processing.std),
    }


def _stored_shape(family: TowerFamily, shape: VisionShape, name: str, size: tuple[int, ...]) -> tuple[int, ...]:
    """The stored shape of a tensor, by its name outside of its block; empty if it is the same as ours."""
    if name == "embed.proj.weight":
        return (shape.dim, shape.channels, shape.patch_size, shape.patch_size)
    if family.name == "dinov2" and name in ("embed.class_token", "embed.positions"):
        return (1, 1, *size) if name == "embed.class_token" else (1, *size)
    return ()


def text_decoder(model: VLM) -> DecoderConfig:
    """The text model inside of a model with images."""
    return DecoderConfig(**{item.name: getattr(model, item.name) for item in fields(DecoderConfig)})


def text_family(model: VLM) -> Family:
    """The first family that can describe the decoder.

    Raises:
        Unsupported: there is none; names for each family what it cannot describe.
    """
    return nested(chosen(text_decoder(model), None), "the decoder")


def nested(family: Family, where: str) -> Family:
    """Returns the family of a text model inside of another model.

    Raises:
        Unsupported: the names of its tensors there are not known.
    """
    if family.outside or family.layers != Family.layers or type(family).spelled is not Family.spelled:
        raise Unsupported(f"{where}: a text model of the family {family.model_type!r} inside of another model is not implemented")
    return family


def text_misfits(model: VLM) -> list[str]:
    """Why no family of text models can describe the decoder; empty if one can."""
    try:
        text_family(model)
    except Unsupported as cause:
        return str(cause).splitlines()
    return []


def text_places(family: Family, decoder: DecoderConfig, prefix: str) -> dict[str, TensorPlace]:
    """Global name -> place of every tensor of the decoder; their names begin with `prefix`."""
    places = places_in(family, decoder)
    return {name: replace(place, names=tuple(prefix + theirs for theirs in place.names)) for name, place in places.items()}


def tilers_of_run(weights: Weights) -> list[str]:
    """The tilers, other than `square`, with which the run that wrote the weights cut images."""
    data = weights.facts.recipe.get("data") or {}
    sources = data.get("sources") or () if isinstance(data, Mapping) else ()
    tilings: list[Any] = [source.get("tiling") or {} for source in sources if isinstance(source, Mapping)]
    return sorted({tiling.get("name", "square") for tiling in tilings} - {"square"})
