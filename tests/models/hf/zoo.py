"""Tiny random models of transformers, one per family and option, and what the tests ask of them."""

import os
from copy import deepcopy
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from harness.closeness import wide

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

GPT2_SIZES = {
    "vocab_size": 97,
    "n_embd": 32,
    "n_inner": 48,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def sizes_of(kind: str) -> dict[str, Any]:
    """The keys of a tiny model that are the same in all cases of a family."""
    return dict(GPT2_SIZES if kind == "gpt2" else SIZES)


GEMMA: dict[str, Any] = {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24}

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

QWEN3_MOE = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.8,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 8,
    "v_head_dim": 7,
}

INDEXER = {"index_n_heads": 9, "index_head_dim": 14, "index_topk": 5}

DEEPSEEK_V4: dict[str, Any] = {
    "num_key_value_heads": 1,
    "head_dim": 12,
    "intermediate_size": 20,
    "moe_intermediate_size": 20,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.8,
    "num_hash_layers": 2,
    "layer_types": [
        *("heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention", "compressed_sparse_attention")
    ],
    "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 5},
    "sliding_window": 7,
    "q_lora_rank": 10,
    "o_groups": 2,
    "o_lora_rank": 9,
    "index_n_heads": 11,
    "index_head_dim": 8,
    "index_topk": 4,
    "partial_rotary_factor": 0.5,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 4,
    "hc_eps": 1e-3,
    "swiglu_limit": 0.8,
    "rope_theta": 300.0,
    "compress_rope_theta": 700.0,
}

NEMOTRON_H: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
    "head_dim": 12,
    "ssm_state_size": 6,
    "mamba_num_heads": 4,
    "mamba_head_dim": 10,
    "n_groups": 2,
    "time_step_min": 1e-6,
}
"""The reference limits steps in whole rows but not with a cache, so the limit is too small to matter here."""

KIMI_LINEAR: dict[str, Any] = {
    "num_key_value_heads": 4,
    "linear_num_heads": 3,
    "linear_head_dim": 6,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 8,
    "v_head_dim": 7,
}

LLAMA4: dict[str, Any] = {
    "head_dim": 12,
    "intermediate_size": 20,
    "intermediate_size_mlp": 44,
    "num_local_experts": 5,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 7,
    "floor_scale": 3,
    "attn_scale": 0.7,
}

QWEN2_MOE: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 40,
}
GLM4_MOE: dict[str, Any] = {
    "hidden_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.8,
}

GPT_OSS: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": 6,
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "swiglu_limit": 0.4,
    "rope_parameters": YARN | {"truncate": False, "rope_theta": 700.0},
}

NEOX: dict[str, Any] = {"hidden_size": 64, "num_key_value_heads": 4}
"""Heads of 16, of which at least four dimensions rotate."""

QWEN3_NEXT: dict[str, Any] = {
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 40,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
}

QWEN3_5 = {key: value for key, value in QWEN3_NEXT.items() if key.startswith(("head_dim", "linear"))}
SECTIONS: dict[str, Any] = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}

MINIMAX: dict[str, Any] = {"hidden_size": 64, "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 3}

LOCAL, FULL = "sliding_attention", "full_attention"
LINEAR = {"rope_type": "linear", "factor": 4.0}
PROPORTIONAL = {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 700.0}
GEMMA4_LOCAL = {"rope_type": "default", "rope_theta": 50.0}
GEMMA4: dict[str, Any] = {
    "head_dim": 12,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 6,
    "num_hidden_layers": 7,
    "final_logit_softcapping": 5.0,
    "rope_parameters": {"sliding_attention": GEMMA4_LOCAL, "full_attention": PROPORTIONAL},
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12, "num_key_value_heads": 1}),
    "llama-linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama-dynamic": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 16}),
    "llama-llama3": ("llama", {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 16}, "rope_theta": 5000.0}),
    "llama-yarn": ("llama", {"rope_scaling": YARN}),
    "mistral": ("mistral", {"sliding_window": 6}),
    "mistral-full": ("mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen2-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    "qwen2-tied-yarn": ("qwen2", {"tie_word_embeddings": True, "rope_scaling": YARN | {"beta_fast": 16.0, "truncate": False}}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
    "olmo2": ("olmo2", {}),
    "olmo2-tied": ("olmo2", {"tie_word_embeddings": True, "attention_bias": True}),
    "gemma2": ("gemma2", GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}),
    "gemma2-untied": ("gemma2", GEMMA | {"tie_word_embeddings": False, "attn_logit_softcapping": None}),
    "ministral3": (
        "ministral3",
        {"head_dim": 16, "rope_parameters": YARN | {"rope_theta": 700.0, "llama_4_scaling_beta": 0.7, "mscale": 1.0}},
    ),
    "ministral3-window-tied-plain": (
        "ministral3",
        {"head_dim": 12, "sliding_window": 6, "tie_word_embeddings": True, "rope_theta": 700.0}
        | {"rope_scaling": {"rope_type": "default", "original_max_position_embeddings": 5, "llama_4_scaling_beta": 1.3}},
    ),
    "ministral3-without-factor": (
        "ministral3",
        {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.0, "mscale": 1.0, "mscale_all_dim": 0.0, "rope_theta": 700.0}},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "sliding_window": 6}),
    "mixtral-full": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 3, "tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", QWEN3_MOE),
    "qwen3_moe-raw": (
        "qwen3_moe",
        QWEN3_MOE
        | {"norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": [0, 1], "attention_bias": True}
        | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    ),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK),
    "deepseek_v3-plain": (
        "deepseek_v3",
        DEEPSEEK | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ),
    "deepseek_v3-yarn": ("deepseek_v3", DEEPSEEK | {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}}),
    "deepseek_v32": ("deepseek_v32", DEEPSEEK | INDEXER | {"rope_theta": 700.0}),
    "deepseek_v32-yarn-tied": (
        "deepseek_v32",
        DEEPSEEK
        | INDEXER
        | {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}, "index_topk": 3, "index_head_dim": 6}
        | {"tie_word_embeddings": True, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ),
    "deepseek_v4": ("deepseek_v4", DEEPSEEK_V4 | {"rope_parameters": YARN}),
    "deepseek_v4-without-windows-sigmoid-tied": (
        "deepseek_v4",
        DEEPSEEK_V4
        | {"layer_types": None, "scoring_func": "sigmoid", "tie_word_embeddings": True, "rms_norm_eps": 1e-3, "hc_mult": 2}
        | {"qk_rope_head_dim": 4, "partial_rotary_factor": None, "o_groups": 4, "index_topk": 2}
        | {"num_hash_layers": None, "mlp_layer_types": ["moe", "hash_moe", "moe", "moe"]},
    ),
    "qwen2_moe": ("qwen2_moe", QWEN2_MOE | {"rope_theta": 700.0}),
    "qwen2_moe-raw": (
        "qwen2_moe",
        QWEN2_MOE
        | {"norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": [0, 1], "qkv_bias": False}
        | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 3, "tie_word_embeddings": True},
    ),
    "glm4_moe": ("glm4_moe", GLM4_MOE | {"use_qk_norm": True, "attention_bias": True, "rope_theta": 700.0}),
    "glm4_moe-plain-quarter-yarn": (
        "glm4_moe",
        GLM4_MOE
        | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "rope_scaling": YARN, "partial_rotary_factor": 0.25}
        | {"tie_word_embeddings": True, "head_dim": 24},
    ),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "gpt_oss-without-biases-tied": (
        "gpt_oss",
        GPT_OSS
        | {"attention_bias": False, "tie_word_embeddings": True, "swiglu_alpha": 1.1, "head_dim": 12}
        | {"layer_types": ["full_attention", "full_attention", "sliding_attention", "full_attention"]},
    ),
    "qwen3_next": ("qwen3_next", QWEN3_NEXT),
    "qwen3_next-listed-biases-tied": (
        "qwen3_next",
        QWEN3_NEXT
        | {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"], "attention_bias": True}
        | {"tie_word_embeddings": True, "linear_num_value_heads": 2, "linear_conv_kernel_dim": 3, "norm_topk_prob": False}
        | {"decoder_sparse_step": 2, "rope_parameters": {"rope_theta": 700.0, "partial_rotary_factor": 0.5}},
    ),
    "qwen3_5_text": ("qwen3_5_text", QWEN3_5),
    "qwen3_5_text-listed-biases-tied": (
        "qwen3_5_text",
        QWEN3_5
        | {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"], "attention_bias": True}
        | {"tie_word_embeddings": True, "linear_num_value_heads": 2, "linear_conv_kernel_dim": 3}
        | {"rope_parameters": {"rope_theta": 700.0, "partial_rotary_factor": 0.5, "rope_type": "default"} | SECTIONS},
    ),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", QWEN3_5 | QWEN2_MOE | {"rope_parameters": {"rope_theta": 700.0} | SECTIONS}),
    "minimax_m2": ("minimax_m2", MINIMAX | {"rope_parameters": {"rope_theta": 700.0, "partial_rotary_factor": 0.5}}),
    "minimax_m2-whole-tied-yarn": (
        "minimax_m2",
        MINIMAX | {"rope_scaling": YARN, "rope_theta": 900.0, "tie_word_embeddings": True, "num_experts_per_tok": 1},
    ),
    "olmo_hybrid": ("olmo_hybrid", {"rope_theta": None, "num_hidden_layers": 5}),
    "olmo_hybrid-listed-biases-tied-rotary": (
        "olmo_hybrid",
        {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"], "attention_bias": True}
        | {"tie_word_embeddings": True, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 10}
        | {"linear_value_head_dim": 14, "linear_conv_kernel_dim": 3, "linear_allow_neg_eigval": False, "rms_norm_eps": 1e-3}
        | {"rope_parameters": YARN | {"rope_theta": 700.0}},
    ),
    "nemotron_h": ("nemotron_h", NEMOTRON_H),
    "nemotron_h-experts-biases": (
        "nemotron_h",
        NEMOTRON_H
        | {"layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "moe", "linear_attention"]}
        | {"num_hidden_layers": 6, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_group": 4}
        | {"moe_shared_expert_intermediate_size": 40, "topk_group": 2, "routed_scaling_factor": 1.8, "use_bias": True}
        | {"use_conv_bias": False, "conv_kernel": 3, "layer_norm_epsilon": 1e-3, "time_step_min": 1e-6},
    ),
    "nemotron_h-experts-and-feed-forward-without-recurrent": (
        "nemotron_h",
        NEMOTRON_H
        | {
            "layers_block_type": ["full_attention", "mlp", "full_attention", "moe"],
            "n_routed_experts": 6,
            "norm_topk_prob": False,
        }
        | {"moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 20},
    ),
    "nemotron_h-latent-experts": (
        "nemotron_h",
        NEMOTRON_H
        | {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "n_routed_experts": 6}
        | {"moe_latent_size": 14, "moe_intermediate_size": 20, "moe_shared_expert_intermediate_size": 40},
    ),
    "kimi_linear": ("kimi_linear", KIMI_LINEAR),
    "kimi_linear-published-names-latent-queries-every-second-sparse": (
        "kimi_linear",
        {key: value for key, value in KIMI_LINEAR.items() if not key.startswith(("n_", "num_", "layer_types"))}
        | {"num_key_value_heads": 4, "num_experts": 6, "num_experts_per_token": 2, "num_shared_experts": 1}
        | {"q_lora_rank": 12, "moe_renormalize": False, "num_expert_group": 1, "topk_group": 1}
        | {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"], "rms_norm_eps": 1e-3, "routed_scaling_factor": 0.7}
        | {
            "linear_attn_config": {"full_attn_layers": [3, 4], "kda_layers": [1, 2]}
            | {"num_heads": 4, "head_dim": 10, "short_conv_kernel_size": 3}
        },
    ),
    "kimi_linear-without-recurrent-dense": (
        "kimi_linear",
        KIMI_LINEAR | {"layer_types": ["full_attention"] * 4, "mlp_layer_types": ["dense"] * 4},
    ),
    "llama4_text": ("llama4_text", LLAMA4),
    "llama4_text-two-choices-biases-tied-llama3": (
        "llama4_text",
        LLAMA4
        | {"num_experts_per_tok": 2, "moe_layers": [1, 2, 3], "attention_bias": True, "tie_word_embeddings": True}
        | {"no_rope_layers": [1, 0, 0, 1], "layer_types": ["full_attention", "chunked_attention"] * 2, "rms_norm_eps": 1e-2}
        | {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 16}, "rope_theta": 700.0},
    ),
    "llama4_text-dense-without-norms-temperature-and-chunks-yarn": (
        "llama4_text",
        LLAMA4
        | {"moe_layers": [], "use_qk_norm": False, "attn_temperature_tuning": False, "no_rope_layer_interval": 2}
        | {"layer_types": ["full_attention"] * 4, "rope_scaling": YARN, "rope_theta": 700.0},
    ),
    "llama4_text-normed-yarn": ("llama4_text", LLAMA4 | {"rope_scaling": YARN, "interleave_moe_layer_step": 1}),
    "gemma3": ("gemma3_text", GEMMA | {"num_hidden_layers": 7}),
    "gemma3-untied-linear": (
        "gemma3_text",
        GEMMA | {"tie_word_embeddings": False, "rope_scaling": {"rope_type": "linear", "factor": 4.0}, "num_hidden_layers": 7},
    ),
    "gemma4_text": ("gemma4_text", GEMMA4),
    "gemma4_text-untied-biases-linear": (
        "gemma4_text",
        GEMMA4
        | {"tie_word_embeddings": False, "attention_bias": True, "rms_norm_eps": 1e-3, "attention_k_eq_v": False}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"], "global_head_dim": 8}
        | {"rope_parameters": {"sliding_attention": GEMMA4_LOCAL, "full_attention": LINEAR | {"rope_theta": 900.0}}}
        | {"final_logit_softcapping": None, "num_hidden_layers": 4},
    ),
    "gemma4_text-global-proportional-factor": (
        "gemma4_text",
        GEMMA4
        | {"layer_types": ["full_attention"] * 4, "num_global_key_value_heads": 4, "global_head_dim": 20}
        | {"num_hidden_layers": 4}
        | {"rope_parameters": {"full_attention": PROPORTIONAL | {"partial_rotary_factor": 0.6, "factor": 3.0}}},
    ),
    "gemma4_text-inputs-shared-wider": (
        "gemma4_text",
        GEMMA4
        | {"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 101, "num_kv_shared_layers": 3, "rms_norm_eps": 1e-3}
        | {"use_double_wide_mlp": True, "layer_types": [LOCAL, FULL, LOCAL, FULL, LOCAL, LOCAL, FULL], "attention_bias": True},
    ),
    "gemma4_text-experts-inputs-shared": (
        "gemma4_text",
        GEMMA4
        | {"hidden_size_per_layer_input": 10, "vocab_size_per_layer_input": 97, "num_kv_shared_layers": 2, "num_hidden_layers": 4}
        | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 24}
        | {"layer_types": [LOCAL, FULL, LOCAL, FULL], "attention_k_eq_v": False, "tie_word_embeddings": False},
    ),
    "gemma4_text-experts": (
        "gemma4_text",
        GEMMA4
        | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 16, "rms_norm_eps": 1e-3}
        | {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    ),
    "stablelm": ("stablelm", {}),
    "stablelm-half-biases-tied-yarn": (
        "stablelm",
        {"partial_rotary_factor": 0.5, "use_qkv_bias": True, "tie_word_embeddings": True, "rope_scaling": YARN},
    ),
    "gpt_neox": ("gpt_neox", NEOX | {"rotary_pct": 0.25, "rotary_emb_base": 700, "rope_parameters": None}),
    "gpt_neox-serial-half-without-biases-tied-linear": (
        "gpt_neox",
        NEOX
        | {"use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True, "layer_norm_eps": 1e-3}
        | {"rotary_pct": 0.5, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    ),
    "gpt2": ("gpt2", {}),
    "gpt2-exact-unscaled-untied": (
        "gpt2",
        {"activation_function": "gelu", "scale_attn_weights": False, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3}
        | {"n_inner": None, "n_positions": 48},
    ),
    "cohere": ("cohere", {"logit_scale": 0.3, "rope_theta": 700.0}),
    "cohere-biases-untied-wide-linear": (
        "cohere",
        {"attention_bias": True, "tie_word_embeddings": False, "head_dim": 12, "layer_norm_eps": 1e-3, "logit_scale": 2.5}
        | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
    "cohere2": ("cohere2", {"sliding_window": 6, "num_hidden_layers": 5, "logit_scale": 0.3, "rope_theta": 700.0}),
    "cohere2-listed-biases-untied-yarn": (
        "cohere2",
        {"sliding_window": 9, "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]}
        | {"attention_bias": True, "tie_word_embeddings": False, "layer_norm_eps": 1e-3, "rope_scaling": YARN},
    ),
    "cohere2-full": ("cohere2", {"layer_types": ["full_attention"] * 4}),
    "cohere2-local": ("cohere2", {"layer_types": ["sliding_attention"] * 4, "sliding_window": 6}),
    "olmo": ("olmo", {"rope_theta": 700.0}),
    "olmo-biases-tied-linear": (
        "olmo",
        {"attention_bias": True, "tie_word_embeddings": True, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
    "granite": (
        "granite",
        {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22, "attention_multiplier": 0.3},
    ),
    "granite-biases-tied-yarn": (
        "granite",
        {"embedding_multiplier": 3.5, "logits_scaling": 1.3, "residual_multiplier": 0.7, "attention_multiplier": 0.1}
        | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "rope_scaling": YARN},
    ),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 3}),
    "smollm3-listed-windows-biases-untied": (
        "smollm3",
        {"no_rope_layers": [0, 1, 0, 1, 1], "use_sliding_window": True, "sliding_window": 6, "rope_scaling": YARN}
        | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    ),
}
"""Name of a case -> (model_type, keys of the configuration)."""


def random_model(kind: str, keys: dict[str, Any], seed: int = 0) -> torch.nn.Module:
    """A model of transformers whose weights are spread, so that every part of it shows in the logits."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **deepcopy(sizes_of(kind) | keys))  # it writes into tables
    config._attn_implementation = config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # some classes draw decays of their own
        model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(drawn * 0.2)
            else:
                parameter.add_(drawn * 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "layer_scalar")):
                buffer.add_(0.2 * torch.randn(buffer.shape, generator=generator))
            if name.endswith("tid2eid"):  # different experts for each token
                experts = torch.rand(len(buffer), config.n_routed_experts, generator=generator).argsort(-1)
                buffer.copy_(experts[:, : buffer.shape[1]])
    return model


def saved(model: torch.nn.Module, folder: Path, **options: Any) -> Path:
    """The folder as transformers writes it."""
    model.save_pretrained(folder, **options)  # type: ignore[operator]
    if model.config.model_type == "olmo_hybrid":  # type: ignore[union-attr]
        _separate_filters(model, folder)
    return folder


def _separate_filters(model: Any, folder: Path) -> None:
    """Writes the filters of q, k and v as they are published; transformers cuts their matrix into three equal parts instead."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    for name, module in model.named_modules():
        if hasattr(module, "conv1d"):
            parts = module.conv1d.weight.detach().split((module.key_dim, module.key_dim, module.value_dim))
            tensors |= {f"{name}.{letter}_conv1d.weight": part.clone() for letter, part in zip("qkv", parts, strict=True)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def exact_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """(B, T, vocab) of a model of transformers with the same weights in fp64 throughout, its fp32 islands included."""
    config = deepcopy(model.config)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # grouped products do not take fp64
    with wide(), torch.no_grad():
        twin = type(model)._from_config(config, dtype=torch.float64).eval()
        twin.load_state_dict(model.state_dict())
        return twin(ids).logits


def tokens(rows: int = 2, length: int = 40, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))
