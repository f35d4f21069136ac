"""Global names <-> names in a Hugging Face checkpoint, from a family's data."""

from collections.abc import Iterable

from forge_models.components.decoder import Decoder
from forge_models.hf.family import Family

OUTSIDE = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
"""Tensors outside of the blocks; the same in every family."""

HEAD = "lm_head.weight"
DERIVED = ("rotary_emb.inv_freq",)
"""Ends of names of buffers that follow from the configuration; old checkpoints hold them, and they are not read."""


def name_in(family: Family, name: str) -> str:
    """The name in the checkpoint of a tensor by its global name.

    Raises:
        KeyError: the family has no such tensor.
    """
    if name in OUTSIDE:
        return OUTSIDE[name]
    blocks, layer, part, rest = name.split(".", 3)
    if blocks != "blocks":
        raise KeyError(name)
    return f"model.layers.{layer}.{family.parts[part]}.{rest}"


def names_in(family: Family, names: Iterable[str]) -> dict[str, str]:
    """Global name -> name in the checkpoint, for every tensor of a model.

    Raises:
        KeyError: the family lacks one of them.
    """
    return {name: name_in(family, name) for name in names}


def shapes_of(decoder: Decoder) -> dict[str, tuple[int, ...]]:
    """Global name -> shape of every parameter of a model; a tied copy is not repeated. Nothing is allocated."""
    import torch

    with torch.device("meta"):
        module = decoder.build()
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
