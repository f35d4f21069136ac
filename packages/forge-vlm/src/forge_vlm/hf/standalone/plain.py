"""Components as tables of JSON and back: those of this list and no others, so that a folder never names code to run."""

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


def plain(value: Any) -> Any:
    """A component as a table. A published tower is that of the folder itself, as it is built."""
    if isinstance(value, Published):
        return {KIND: kind_of(type(value)), "feature_layers": list(value.shape.outputs), "class_feature": value.class_feature}
    if is_dataclass(value) and not isinstance(value, type):
        kept = {item.name: plain(getattr(value, item.name)) for item in fields(value) if item.name not in NOT_KEPT}
        return {KIND: kind_of(type(value)), **kept}
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def made(value: Any, folder: Path) -> Any:
    """The component of a table that `plain` made.

    Raises:
        Unsupported: the table is of something else.
    """
    if isinstance(value, list):
        return tuple(made(item, folder) for item in value)
    if not isinstance(value, Mapping):
        return value
    if KIND not in value:
        return {name: made(item, folder) for name, item in value.items()}
    part = KINDS.get(value[KIND])
    if part is None:
        raise Unsupported(f"{folder}: {value[KIND]!r} is not a part of models of this format; it has {', '.join(KINDS)}")
    given = {name: made(item, folder) for name, item in value.items() if name != KIND}
    if issubclass(part, Published):
        given["path"] = str(folder)
    try:
        return part(**given)
    except (TypeError, ValueError) as cause:
        raise Unsupported(f"{folder}: {value[KIND]}: {cause}") from cause


def component(value: Any, folder: Path) -> VLM:
    """As `made`, for the whole model."""
    found = made(value, folder)
    if not isinstance(found, VLM):
        raise Unsupported(f"{folder} does not say which model its tensors are of")
    return found
