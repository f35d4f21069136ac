"""Which published vision towers there are: what their `config.json` says, and what their tensors are called. No torch."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from forge_models.hf.ignorable import ANY, NONE, Allowed


class TowerFamily(NamedTuple):
    """One kind of tower.

    Attributes:
        name: of the encoder that reads it.
        whole: `model_type` of a model with two towers, whose `vision_config` is read; empty: there is none.
        tower: `model_type` of a vision tower alone.
        defaults: of keys that are absent.
        ignores: keys without effect on features, with the values under which that holds.
        shape: what is the same for all towers of the family.
        names: our names of modules and parameters outside of blocks -> theirs.
        block: path of a block, `{}` stands for its number.
        inner: names inside of a block -> theirs.
        left: beginnings of names of tensors that features do not need.
        antialias: positions are resized bilinearly with antialiasing, elsewhere by bicubic interpolation.
        columns: patches lie in the projection's columns pixel by pixel, elsewhere channel by channel.
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


_EMBED = MappingProxyType(
    {
        "embed.proj": "embeddings.patch_embedding",
        "embed.class_token": "embeddings.class_embedding",
        "embed.positions": "embeddings.position_embedding.weight",
        "entry_norm": "pre_layrnorm",
        "norm": "post_layernorm",
    }
)
_INNER = MappingProxyType(
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
_SIZES = MappingProxyType({"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_channels": 3})
_TRAINING = MappingProxyType({"initializer_factor": ANY, "initializer_range": ANY, "dropout": NONE, "tie_word_embeddings": ANY})
"""Of runs that train the tower, where what is drawn is replaced by stored weights; and what a tower has nothing to do with."""

SIGLIP = TowerFamily(
    name="siglip",
    whole="siglip",
    tower="siglip_vision_model",
    defaults=MappingProxyType(
        {
            **_SIZES,
            "intermediate_size": 3072,
            "image_size": 224,
            "patch_size": 16,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
        }
    ),
    ignores=MappingProxyType({**_TRAINING, "vision_use_head": ANY, "projection_dim": ANY}),
    shape=MappingProxyType({}),
    names=_EMBED,
    block="encoder.layers.{}.",
    inner=_INNER,
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
            **_SIZES,
            "intermediate_size": 3072,
            "image_size": 224,
            "patch_size": 32,
            "hidden_act": "quick_gelu",
            "layer_norm_eps": 1e-5,
        }
    ),
    ignores=MappingProxyType({**_TRAINING, "projection_dim": ANY, "vocab_size": ANY}),
    shape=MappingProxyType({"class_token": True, "patch_bias": False, "entry_norm": True, "final_norm": False}),
    names=_EMBED,
    block="encoder.layers.{}.",
    inner=_INNER,
    left=("embeddings.position_ids", "post_layernorm."),
)
DINOV2 = TowerFamily(
    name="dinov2",
    whole="",
    tower="dinov2",
    defaults=MappingProxyType(
        {
            **_SIZES,
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
            **_TRAINING,
            "hidden_dropout_prob": NONE,
            "attention_probs_dropout_prob": NONE,
            "drop_path_rate": NONE,
            "layerscale_value": ANY,
            "use_mask_token": ANY,
            **dict.fromkeys(("apply_layernorm", "reshape_hidden_states", "stage_names"), ANY),
            **dict.fromkeys(("out_features", "out_indices", "_out_features", "_out_indices"), ANY),
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
"""Names of the gated feed-forward part of DINOv2: its first two matrices are stored as one."""
