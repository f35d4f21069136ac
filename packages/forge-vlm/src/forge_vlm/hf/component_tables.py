"""Components as tables of JSON and back: those of a closed list and no others, so that a folder never names code to run."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from forge_models.components.attentions import GQA
from forge_models.components.experts import MoEConfig, SoftmaxTopKConfig
from forge_models.components.layers import GELU, GeGLU, LayerNormConfig, ReLU, ReLU2, RMSNormConfig, SwiGLU
from forge_models.hf.config import Unsupported
from forge_models.shape import Losses, Rope
from forge_vlm.components.adapters import (
    AttentionPoolConfig,
    AveragePoolConfig,
    LinearConfig,
    MLPConfig,
    PerceiverConfig,
    PixelShuffleConfig,
)
from forge_vlm.components.encoders import CLIP, DINOv2, Features, Published, SigLIP, SigLIP2, ViT
from forge_vlm.components.fusions import CrossAttention, JointDecoder, MixtureOfTransformers, MoMa
from forge_vlm.components.model import VLM

MODEL_TYPE = "forge_standalone"
"""The key `model_type` of folders that have such a table."""
DESCRIPTION = "forge"
"""Key of `config.json` with the parts of the model."""
KIND = "kind"
"""Key of a table with the name of its component."""
PARTS = (
    *(VLM, GQA, SwiGLU, GeGLU, GELU, ReLU, ReLU2, MoEConfig, Losses, RMSNormConfig, LayerNormConfig, SoftmaxTopKConfig, Rope),
    *(JointDecoder, MixtureOfTransformers, MoMa, CrossAttention),
    *(
        ViT,
        CLIP,
        SigLIP,
        SigLIP2,
        DINOv2,
        Features,
        MLPConfig,
        LinearConfig,
        AveragePoolConfig,
        AttentionPoolConfig,
        PixelShuffleConfig,
        PerceiverConfig,
    ),
)


def kind_of(part: type) -> str:
    """Name of a component in a table: that of its class without `Config`."""
    return part.__name__.removesuffix("Config")


KINDS: Mapping[str, type] = {kind_of(part): part for part in PARTS}
NOT_KEPT = ("from_hf", "from_hf_ignore", "path", "ignore")
"""Fields that say where something was, or how it was trained to be what it is."""


def known(value: Any) -> bool:
    """Whether a component is of the list."""
    return KINDS.get(kind_of(type(value))) is type(value)


def table_of(value: Any) -> Any:
    """A component as a table. A published tower is that of the folder itself, as it is built."""
    if isinstance(value, Published):
        return {KIND: kind_of(type(value)), "feature_layers": list(value.shape.outputs), "class_feature": value.class_feature}
    if is_dataclass(value) and not isinstance(value, type):
        kept = {item.name: table_of(getattr(value, item.name)) for item in fields(value) if item.name not in NOT_KEPT}
        return {KIND: kind_of(type(value)), **kept}
    if isinstance(value, Mapping):
        return {str(name): table_of(item) for name, item in value.items()}
    return [table_of(item) for item in value] if isinstance(value, list | tuple) else value


def component_of(value: Any, folder: Path) -> Any:
    """The component of a table that `table_of` made.

    Raises:
        Unsupported: the table is of something else.
    """
    if isinstance(value, list):
        return tuple(component_of(item, folder) for item in value)
    if not isinstance(value, Mapping):
        return value
    if KIND not in value:
        return {name: component_of(item, folder) for name, item in value.items()}
    part = KINDS.get(value[KIND])
    if part is None:
        raise Unsupported(f"{folder}: {value[KIND]!r} is not a part of models of this format; it has {', '.join(KINDS)}")
    given = {name: component_of(item, folder) for name, item in value.items() if name != KIND}
    if issubclass(part, Published):
        given["path"] = str(folder)
    try:
        return part(**given)
    except (TypeError, ValueError) as cause:
        raise Unsupported(f"{folder}: {value[KIND]}: {cause}") from cause


def model_of(config: Mapping[str, Any], folder: Path) -> VLM:
    """The model that the key `forge` of a `config.json` describes.

    Args:
        config: the content of the file.
        folder: where a published tower has its keys, and what errors name.

    Raises:
        Unsupported: the key describes something else.
    """
    found = component_of(config.get(DESCRIPTION), folder)
    if not isinstance(found, VLM):
        raise Unsupported(f"{folder} does not say which model its tensors are of")
    return found
