"""Published vision towers: the names of their tensors, and their shape from `config.json`.

Every key of the file is read, ignored for a documented reason, or an error. Importing this module needs no torch.
"""

from collections.abc import Mapping, Sequence
from math import isqrt
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from forge_models.hf.config import ABSENT_OR_ZERO, ANY_VALUE, CONFIG, Allowed, Keys, Unsupported, read_config
from forge_vlm.encoders.shape import Activation, VisionShape, hidden_states
from forge_vlm.images.processing import Processing, read_processing


class TowerFamily(NamedTuple):
    """One kind of tower.

    Attributes:
        name: name of the encoder that reads it.
        whole: `model_type` of a model that also has a text tower, whose `vision_config` is read; empty if there is none.
        tower: `model_type` of a vision tower alone.
        defaults: values of keys that are absent.
        ignores: keys without effect on features, with the values for which that is true.
        shape: fields of `VisionShape` that are the same for the whole family.
        names: Forge's names of modules and parameters outside of blocks -> names in the files.
        block: path of a block; `{}` stands for its number.
        inner: Forge's names inside of a block -> names in the files.
        left: prefixes of tensors that features do not need.
        antialias: whether positions are resized bilinearly with antialiasing; otherwise by bicubic interpolation.
        columns: whether the projection reads a patch pixel by pixel; otherwise channel by channel.
    """

    name: str
    whole: str
    tower: str
    defaults: Mapping[str, Any]
    ignores: Mapping[str, Allowed]
    shape: Mapping[str, Any]
    names: Mapping[str, str]
    block: str
    inner: Mapping[str, str]
    left: tuple[str, ...]
    antialias: bool = False
    columns: bool = False


_SIGLIP_NAMES = MappingProxyType(
    {
        "embed.proj": "embeddings.patch_embedding",
        "embed.class_token": "embeddings.class_embedding",
        "embed.positions": "embeddings.position_embedding.weight",
        "entry_norm": "pre_layrnorm",
        "norm": "post_layernorm",
    }
)
_SIGLIP_BLOCK_NAMES = MappingProxyType(
    {
        "attention_norm": "layer_norm1",
        "attention.q_proj": "self_attn.q_proj",
        "attention.k_proj": "self_attn.k_proj",
        "attention.v_proj": "self_attn.v_proj",
        "attention.o_proj": "self_attn.out_proj",
        "mlp_norm": "layer_norm2",
        "mlp.up_proj": "mlp.fc1",
        "mlp.down_proj": "mlp.fc2",
    }
)
_DEFAULT_SIZES = MappingProxyType({"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_channels": 3})
_TRAINING_KEYS = MappingProxyType(
    {"initializer_factor": ANY_VALUE, "initializer_range": ANY_VALUE, "dropout": ABSENT_OR_ZERO, "tie_word_embeddings": ANY_VALUE}
)
"""Keys for training and initialization, which have no effect on stored weights."""

SIGLIP = TowerFamily(
    name="siglip",
    whole="siglip",
    tower="siglip_vision_model",
    defaults=MappingProxyType(
        {
            **_DEFAULT_SIZES,
            "intermediate_size": 3072,
            "image_size": 224,
            "patch_size": 16,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
        }
    ),
    ignores=MappingProxyType({**_TRAINING_KEYS, "vision_use_head": ANY_VALUE, "projection_dim": ANY_VALUE}),
    shape=MappingProxyType({}),
    names=_SIGLIP_NAMES,
    block="encoder.layers.{}.",
    inner=_SIGLIP_BLOCK_NAMES,
    left=("head.", "embeddings.position_ids", "post_layernorm."),
)
SIGLIP2 = SIGLIP._replace(
    name="siglip2",
    whole="siglip2",
    tower="siglip2_vision_model",
    defaults=MappingProxyType({**SIGLIP.defaults, "num_patches": 256}),
    antialias=True,
    columns=True,
)
CLIP = TowerFamily(
    name="clip",
    whole="clip",
    tower="clip_vision_model",
    defaults=MappingProxyType(
        {
            **_DEFAULT_SIZES,
            "intermediate_size": 3072,
            "image_size": 224,
            "patch_size": 32,
            "hidden_act": "quick_gelu",
            "layer_norm_eps": 1e-5,
        }
    ),
    ignores=MappingProxyType({**_TRAINING_KEYS, "projection_dim": ANY_VALUE, "vocab_size": ANY_VALUE}),
    shape=MappingProxyType({"class_token": True, "patch_bias": False, "entry_norm": True, "final_norm": False}),
    names=_SIGLIP_NAMES,
    block="encoder.layers.{}.",
    inner=_SIGLIP_BLOCK_NAMES,
    left=("embeddings.position_ids", "post_layernorm."),
)
DINOV2 = TowerFamily(
    name="dinov2",
    whole="",
    tower="dinov2",
    defaults=MappingProxyType(
        {
            **_DEFAULT_SIZES,
            "mlp_ratio": 4,
            "image_size": 224,
            "patch_size": 14,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-6,
            "qkv_bias": True,
            "use_swiglu_ffn": False,
        }
    ),
    ignores=MappingProxyType(
        {
            **_TRAINING_KEYS,
            "hidden_dropout_prob": ABSENT_OR_ZERO,
            "attention_probs_dropout_prob": ABSENT_OR_ZERO,
            "drop_path_rate": ABSENT_OR_ZERO,
            "layerscale_value": ANY_VALUE,
            "use_mask_token": ANY_VALUE,
            **dict.fromkeys(("apply_layernorm", "reshape_hidden_states", "stage_names"), ANY_VALUE),
            **dict.fromkeys(("out_features", "out_indices", "_out_features", "_out_indices"), ANY_VALUE),
        }
    ),
    shape=MappingProxyType({"class_token": True, "layer_scale": True}),
    names=MappingProxyType(
        {
            "embed.proj": "embeddings.patch_embeddings.projection",
            "embed.class_token": "embeddings.cls_token",
            "embed.positions": "embeddings.position_embeddings",
            "norm": "layernorm",
        }
    ),
    block="encoder.layer.{}.",
    inner=MappingProxyType(
        {
            "attention_norm": "norm1",
            "attention.q_proj": "attention.attention.query",
            "attention.k_proj": "attention.attention.key",
            "attention.v_proj": "attention.attention.value",
            "attention.o_proj": "attention.output.dense",
            "attention_scale.weight": "layer_scale1.lambda1",
            "mlp_norm": "norm2",
            "mlp.up_proj": "mlp.fc1",
            "mlp.down_proj": "mlp.fc2",
            "mlp_scale.weight": "layer_scale2.lambda1",
        }
    ),
    left=("embeddings.mask_token", "layernorm."),
)
FAMILIES: Mapping[str, TowerFamily] = MappingProxyType({family.name: family for family in (SIGLIP, SIGLIP2, CLIP, DINOV2)})
GATED: Mapping[str, str] = MappingProxyType(
    {"mlp.gate_proj": "mlp.weights_in", "mlp.up_proj": "mlp.weights_in", "mlp.down_proj": "mlp.weights_out"}
)
"""Forge's names in the gated feed-forward part of DINOv2 -> names in the files, which store the first two matrices as one."""


ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "quick_gelu": "gelu_quick"}
)
IGNORE_HINT = "if it changes no feature, name it in ignore of the encoder"


class Tower(NamedTuple):
    """Description of a stored tower, without its tensors.

    Attributes:
        family: family, with the names of the tensors.
        shape: shape of the module to build.
        grid: number of patches in a row of the stored position table; `shape` may have another grid.
        processing: image processing of the tower.
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
    """Reads the tower in a folder, for images of `size` pixels (default: the size of its preprocessor) or up to `flexible`
    patches.

    Raises:
        ConfigError, Unsupported, ForgeError: a key is not supported, or the model is not of one of `families`.
        ValueError: `feature_layers` or `size` do not fit the tower.
    """
    values, where = read_config(folder), str(folder / CONFIG)
    family, values = _vision_config(values, families, where)
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
        processing = processing.at(positions)  # the stored table is used, and resized for every image
    shape = VisionShape(**fields, flexible=flexible, image_size=processing.size, outputs=hidden_states(feature_layers, layers))
    return Tower(family, shape, positions // patch, processing)


def tower_fields(
    family: TowerFamily, values: Mapping[str, Any], where: str, ignore: Sequence[str] = ()
) -> tuple[dict[str, Any], int]:
    """Returns the fields of `VisionShape` from the configuration of a tower, and the image size of its position table in pixels.

    Raises:
        ConfigError: keys are missing, wrong or not supported; the error lists all of them.
    """
    keys = Keys(values, family.defaults, where, family.ignores, ignore, IGNORE_HINT)
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
        keys.given("image_size")  # older files have this key too, but the position table determines the size
    keys.finish()
    return fields, positions


def _vision_config(values: Mapping[str, Any], families: Sequence[str], where: str) -> tuple[TowerFamily, dict[str, Any]]:
    """Returns the family, and the keys of its vision tower."""
    kind = values.get("model_type")
    for family in (FAMILIES[name] for name in families):
        if kind == family.tower:
            return family, dict(values)
        inner = values.get("vision_config")
        if kind == family.whole:
            if not isinstance(inner or {}, dict):
                raise Unsupported(f"{where}: vision_config is not a table")
            return family, inner or {}
        if isinstance(inner, dict) and inner.get("model_type") == family.tower:  # part of a larger model, such as LLaVA
            return family, inner
    known = [name for family in families for name in (FAMILIES[family].whole, FAMILIES[family].tower) if name]
    raise Unsupported(f"{where}: model_type {kind!r} is not one of this encoder; it reads {', '.join(known)}")


def _ffn_dim(keys: Keys, family: TowerFamily, dim: int, gated: bool) -> int:
    if "mlp_ratio" not in family.defaults:
        return keys.integer("intermediate_size")
    return ffn_width(dim, keys.integer("mlp_ratio"), gated)


def ffn_width(dim: int, ratio: int, gated: bool) -> int:
    """Returns the hidden width of DINOv2's feed-forward part, which `config.json` has as a ratio."""
    # With a gate, two thirds of the width, rounded up to a multiple of 8, keep the number of weights (Oquab et al., 2023).
    return -(-(2 * dim * ratio // 3) // 8) * 8 if gated else dim * ratio
