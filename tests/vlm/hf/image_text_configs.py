"""Small configurations of image-text models, in which every part of a class is used."""

import json
from collections.abc import Mapping
from typing import Any

from models.hf import causal_lm_walk
from models.hf.causal_lm_walk import _shrunk

VOCAB, IMAGE = 96, 95

TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 2,
}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
MERGING = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 2,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
VIDEO = {"video_token_id": 94, "vision_start_token_id": 92, "vision_end_token_id": 93}
CLIP = {**VISION, "model_type": "clip_vision_model"}
LLAMA = {**TEXT, "model_type": "llama"}
COHERE = {**TEXT, "model_type": "cohere2"}
CONFIGS: Mapping[str, dict[str, Any]] = {
    "aya_vision": {
        "text_config": COHERE,
        "vision_config": VISION,
        "downsample_factor": 2,
        "adapter_layer_norm_eps": 1e-6,
        "alignment_intermediate_size": 16,
    },
    "cohere2_vision": {
        "text_config": COHERE,
        "vision_config": VISION,
        "downsample_factor": 2,
        "alignment_intermediate_size": 16,
    },
    "gemma3": {
        "text_config": {**TEXT, "sliding_window": 6, "query_pre_attn_scalar": 8},
        "vision_config": VISION,
        "mm_tokens_per_image": 4,
    },
    "gemma4": {
        "text_config": {
            **{key: value for key, value in TEXT.items() if key != "head_dim"},
            "head_dim": 8,
            "num_hidden_layers": 3,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "use_bidirectional_attention": "vision",
            "per_layer_config": {},
        },
        "vision_config": {
            **VISION,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "pooling_kernel_size": 2,
            "position_embedding_size": 16,
        },
        "video_token_id": 94,
        "audio_token_id": 93,
    },
    "glm4v": {
        "text_config": {**TEXT, **ROPE},
        "vision_config": {**MERGING, "out_hidden_size": 32, "image_size": 16},
        "video_token_id": 94,
        "image_start_token_id": 92,
        "image_end_token_id": 93,
    },
    "idefics3": {"text_config": LLAMA, "vision_config": VISION, "scale_factor": 2},
    "internvl": {
        "text_config": {**TEXT, "model_type": "qwen2"},
        "vision_config": {**VISION, "image_size": [8, 8], "patch_size": [2, 2]},
        "downsample_ratio": 0.5,
        "image_seq_length": 4,
    },
    "llava": {"text_config": LLAMA, "vision_config": CLIP},
    "llava_pixtral": {
        "text_config": LLAMA,
        "vision_config": {**VISION, "num_hidden_layers": 2, "head_dim": 8, "model_type": "pixtral"},
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
    "qwen2_5_vl": {
        "text_config": {**TEXT, **ROPE},
        "vision_config": {**MERGING, "out_hidden_size": 32, "window_size": 8, "fullatt_block_indexes": [1]},
        **VIDEO,
    },
    "qwen2_vl": {
        "text_config": {**TEXT, **ROPE},
        "vision_config": {
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 2,
            "patch_size": 2,
            "mlp_ratio": 2,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        **VIDEO,
    },
    "qwen3_vl": {
        "text_config": {**TEXT, **ROPE},
        "vision_config": {
            **MERGING,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        },
        **VIDEO,
    },
    "smolvlm": {"text_config": LLAMA, "vision_config": VISION, "scale_factor": 2},
    "vipllava": {"text_config": LLAMA, "vision_config": CLIP, "vision_feature_layers": [-1, -2]},
}
"""Small configurations by model_type, given whole."""
SAME = {"llava_pixtral": "llava"}
"""Further configurations of a model_type, whose images have another form."""


SHRUNK = {
    **dict.fromkeys(("depth", "num_hidden_layers", "num_heads", "num_attention_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("patch_size", "spatial_merge_size", "temporal_patch_size", "patch_temporal", "merge_size"), 2),
    **dict.fromkeys(("hidden_size", "embed_dim", "out_hidden_size", "text_hidden_size", "projection_hidden_dim"), 32),
    **dict.fromkeys(("pooling_kernel_size", "downsample_factor"), 2),
    **dict.fromkeys(("pos_emb_height", "pos_emb_width", "posemb_grid_size"), 4),
    **dict.fromkeys(("num_position_embeddings", "num_patches", "head_dim", "max_position_embeddings"), 16),
    **dict.fromkeys(("image_size", "window_size"), 8),
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
}
"""Sizes of a vision tower by key."""
SHRUNK_PARTS = ("vision", "vq", "audio")
"""Parts of the names of configurations of towers."""
CUT = {"image_grid_pinpoints": [[8, 16], [16, 8]], "vision_config": {"patch_size": 4}}
MUSE = {"out_hidden_size": 128, "projector_hidden_size": 48}
SPECIAL: Mapping[str, dict[str, Any]] = {
    "cohere_compass": {"vision_config": {"deepstack_visual_indexes": [0, 1]}},
    "cosmos3_omni": {"vision_config": {"deepstack_visual_indexes": [0, 1]}},
    **{kind: {"text_config": ROPE} for kind in ("glm46v", "glm_ocr", "glmga", "paddleocr_vl")},
    "exaone4_5": {"vision_config": {"fullatt_block_indexes": [1]}},
    **dict.fromkeys(("llava_next", "llava_next_video", "llava_onevision"), CUT),
    "hyperclovax_vision_v2": {"vision_config": {"fullatt_block_indexes": [1]}},
    "glm4v_moe": {"text_config": {**ROPE, "head_dim": 16}},
    "glm5_next": {"text_config": {"qk_rope_head_dim": 0, "head_dim": 0, "qk_head_dim": 8, "index_kpool": 4}},
    **{kind: {"vision_config": {"image_size": 16, "global_attn_indexes": [1]}} for kind in ("got_ocr2", "pp_chart2table")},
    "hunyuan_vl": {
        "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 1, 1]}},
        "vision_config": {"max_image_size": 16, "temporal_patch_size": 1},
    },
    "hy_v4_vl": {
        "text_config": {
            "indexer_types": ["full", "shared"] * 2,
            "hc_mult": 2,
            "qk_rope_head_dim": 8,
            "qk_head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        },
        "vision_config": {"max_image_size": 16},
    },
    "janus": {"vision_config": {"projection_dim": 32}, "vq_config": {"base_channels": 32, "latent_channels": 32}},
    "paligemma": {"vision_config": {"projection_dim": 32}, "projection_dim": 32},
    "kimi_k25": {"projection_hidden_size": 32},
    "inkling2": {"vision_config": {"text_hidden_size": 32}},
    "lfm3_vl": {"vision_config": {"layer_types": ["conv", "full_attention"]}},
    "llama4": {
        "vision_config": {
            "pixel_shuffle_ratio": 0.5,
            "intermediate_size": 128,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
            "vision_output_dim": 32,
            "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
        },
    },
    "mistral_large4": {"text_config": {"kv_source_layers": None}},
    "qianfan_ocr": {"vision_config": {"image_size": [8, 8], "patch_size": [2, 2]}},
    "muse_glimmer": {**MUSE, "vision_config": {"layer_types": ["window_attention", "full_attention"]}},
    "muse_spark": {
        **MUSE,
        "vision_config": {"layer_types": ["window_attention", "full_attention"]},
        "audio_config": {"num_hidden_layers": 4, "patch_sizes": [2] * 4, "hidden_sizes": [8] * 4, "out_hidden_size": 32},
    },
    "qwen3_vl_moe": {"vision_config": {"deepstack_visual_indexes": [0, 1]}},
}
"""Keys that have to fit the small sizes of one class, or that turn on what its defaults leave out."""


def small(kind: str) -> str:
    """Returns the content of config.json of a small model."""
    from transformers import CONFIG_MAPPING

    values = {"image_token_id": IMAGE, "image_token_index": IMAGE, **CONFIGS[kind]} if kind in CONFIGS else _of_defaults(kind)
    full = CONFIG_MAPPING[SAME.get(kind, kind)].from_dict(json.loads(json.dumps(values))).to_dict()
    _without_dropout(full)
    return json.dumps(full, default=str)


def _of_defaults(kind: str) -> dict[str, Any]:
    """Returns the default configuration of a class with small sizes."""
    from transformers import CONFIG_MAPPING

    values = _smaller(CONFIG_MAPPING[kind]().to_dict(), SHRUNK_PARTS)
    return _merged(json.loads(json.dumps(values, default=str)), SPECIAL.get(kind, {}))


def _smaller(values: Mapping[str, Any], parts: tuple[str, ...], vision: bool = False) -> dict[str, Any]:
    found = dict(values) if vision else _shrunk(values) | causal_lm_walk.SPECIAL.get(values.get("model_type", ""), {})
    for key, value in found.items():
        if isinstance(value, dict) and key.endswith(("_config", "encoder", "decoder")):
            found[key] = _smaller(value, parts, vision or any(part in key for part in parts))
        elif vision and key in SHRUNK and isinstance(value, int | float):
            found[key] = SHRUNK[key]
        elif key == "rope_parameters" and isinstance(value, dict) and "mrope_section" in value:
            found[key] = {**value, "mrope_section": [1, 1, 2]}
        elif key.endswith(("token_id", "token_index")) and isinstance(value, int) and value >= VOCAB:
            found[key] = VOCAB - 4
    for key, token in (("image_token_id", IMAGE), ("image_token_index", IMAGE), ("video_token_id", IMAGE - 1)):
        if key in found:
            found[key] = token
    return found


def _merged(values: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in more.items():
        values[key] = _merged(values[key], value) if isinstance(value, dict) and isinstance(values.get(key), dict) else value
    return values


def _without_dropout(values: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict):
            _without_dropout(value)
        elif "drop" in str(key) and isinstance(value, float):
            values[key] = 0.0
