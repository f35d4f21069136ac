"""The shape of a published vision tower, from `config.json` of its folder. Every key is read, ignored or refused. No torch."""

from collections.abc import Mapping, Sequence
from math import isqrt
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from forge_models.hf.config import CONFIG, Keys, Unsupported, read_config
from forge_vlm.encoders.hf.families import FAMILIES, TowerFamily
from forge_vlm.encoders.shape import Activation, VisionShape, hidden_states
from forge_vlm.images.processing import Processing, read_processing

ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "quick_gelu": "gelu_quick"}
)
HINT = "if it changes no feature, name it in ignore of the encoder"


class Tower(NamedTuple):
    """What a folder says, without tensors.

    Attributes:
        family: how its tensors are called.
        shape: of what is built.
        grid: patches in a row for which it has positions; the shape may have another one.
        processing: how images become its pixels.
    """

    family: TowerFamily
    shape: VisionShape
    grid: int
    processing: Processing


def read_tower(
    folder: Path,
    families: Sequence[str],
    *,
    size: int | None = None,
    flexible: int = 0,
    feature_layers: tuple[int, ...] = (),
    class_feature: bool = False,
    ignore: Sequence[str] = (),
) -> Tower:
    """What the folder holds, for images of `size` pixels (by default those of its preprocessor), or of up to `flexible` patches.

    Raises:
        ConfigError, Unsupported, ForgeError: a key that is not understood, or a model that is none of `families`.
        ValueError: `feature_layers` or `size` do not fit it.
    """
    values, where = read_config(folder), str(folder / CONFIG)
    family, values = _vision(values, families, where)
    fields, positions = tower_fields(family, values, where, ignore)
    layers, patch, channels = fields["layers"], fields["patch_size"], fields["channels"]
    fields["class_feature"] = class_feature
    processing = read_processing(folder, positions, channels)
    processing = processing if size is None else processing.at(size)
    if flexible:
        if not family.columns:
            raise Unsupported(
                f"{where}: model_type {family.tower!r} was not trained on images of any proportions; remove patches"
            )
        processing = processing.at(positions)  # the table is that of the folder; it is resized for every image
    shape = VisionShape(**fields, flexible=flexible, image_size=processing.size, outputs=hidden_states(feature_layers, layers))
    return Tower(family, shape, positions // patch, processing)


def tower_fields(
    family: TowerFamily, values: Mapping[str, Any], where: str, ignore: Sequence[str] = ()
) -> tuple[dict[str, Any], int]:
    """Fields of `VisionShape` that a configuration of a tower says, and the image size of its table of positions, in pixels.

    Raises:
        ConfigError: every key that is missing, wrong, or not understood.
    """
    keys = Keys(values, family.defaults, where, family.ignores, ignore, HINT)
    layers, dim = keys.integer("num_hidden_layers"), keys.integer("hidden_size")
    patch, channels = keys.integer("patch_size"), keys.integer("num_channels")
    positions = isqrt(keys.integer("num_patches")) * patch if "num_patches" in family.defaults else keys.integer("image_size")
    gated = "use_swiglu_ffn" in family.defaults and keys.boolean("use_swiglu_ffn")
    fields: dict[str, Any] = {
        **family.shape,
        "patch_size": patch,
        "channels": channels,
        "dim": dim,
        "layers": layers,
        "heads": keys.integer("num_attention_heads"),
        "ffn_dim": _ffn_dim(keys, family, dim, gated),
        "eps": keys.number("layer_norm_eps"),
        "activation": ACTIVATIONS.get(keys.only("hidden_act", *ACTIVATIONS), "gelu"),
        "gated": gated,
        "qkv_bias": keys.boolean("qkv_bias") if "qkv_bias" in family.defaults else True,
    }
    if "num_patches" in family.defaults:
        keys.given("image_size")  # older files have it too; positions decide
    keys.finish()
    return fields, positions


def _vision(values: Mapping[str, Any], families: Sequence[str], where: str) -> tuple[TowerFamily, dict[str, Any]]:
    """The family, and the keys of its vision tower."""
    kind = values.get("model_type")
    for family in (FAMILIES[name] for name in families):
        if kind == family.tower:
            return family, dict(values)
        inner = values.get("vision_config")
        if kind == family.whole:
            if not isinstance(inner or {}, dict):
                raise Unsupported(f"{where}: vision_config is not a table")
            return family, inner or {}
        if isinstance(inner, dict) and inner.get("model_type") == family.tower:  # of a model around it, such as LLaVA
            return family, inner
    known = [name for family in families for name in (FAMILIES[family].whole, FAMILIES[family].tower) if name]
    raise Unsupported(f"{where}: model_type {kind!r} is not one of this encoder; it reads {', '.join(known)}")


def _ffn_dim(keys: Keys, family: TowerFamily, dim: int, gated: bool) -> int:
    if "mlp_ratio" not in family.defaults:
        return keys.integer("intermediate_size")
    return width(dim, keys.integer("mlp_ratio"), gated)


def width(dim: int, ratio: int, gated: bool) -> int:
    """Hidden width of DINOv2's feed-forward part, which its files have as a ratio."""
    # Two thirds, rounded up to a multiple of 8: as many weights as without a gate (Oquab et al., 2023).
    return -(-(2 * dim * ratio // 3) // 8) * 8 if gated else dim * ratio
