"""Every family against transformers: logits both ways, round trips, greedy text."""

import json
import shutil
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forge_core.errors import ConfigError, ForgeError
from forge_core.protocols.weights import Weights
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import HashConfig, MoEConfig, SigmoidTopKConfig
from forge_models.generation import generate
from forge_models.hf.config import Unsupported
from forge_models.hf.converter import HfConverter
from forge_models.hf.families import FAMILIES
from forge_models.hf.family import decoder_of, meaning_of, misfits
from forge_models.hf.names import shapes_of
from forge_models.hf.reader import Folder
from forge_models.hf.streamed_forward import logits_of
from forge_models.shape import Losses
from harness.closeness import assert_no_farther, below, wide
from models.hf.zoo import CASES, exact_logits, random_model, saved, sizes_of, tokens


def module_of(weights: Weights) -> torch.nn.Module:
    """Our module with the weights of a folder."""
    model = weights.model.build()
    model.load_state_dict(weights.read(list(weights.tensors)), strict=not model.shape.tied_embeddings)
    return model.eval()


@pytest.mark.parametrize("case", CASES)
def test_both_ways(case: str, tmp_path: Path) -> None:
    kind, keys = CASES[case]
    reference = random_model(kind, keys)
    folder = Folder(saved(reference, tmp_path / "theirs"))
    with torch.no_grad():
        expected = reference(tokens()).logits
    ours = module_of(folder)
    exact = exact_logits(reference, tokens())
    with wide():
        torch.testing.assert_close(logits_of(folder, tokens(), torch.float64), exact, rtol=0, atol=1e-11)
    with torch.no_grad():
        pairs = {"the module": ours(tokens()), "block by block": logits_of(folder, tokens())}
    for what, logits in pairs.items():
        if FAMILIES[kind].recurrent is None:
            assert_no_farther(logits, expected, exact, what)
        else:  # norms of small states amplify rounding, so that the ratio of two errors is mostly luck
            assert below(float((logits - exact).norm()), 1e-3 * float(exact.norm()), what)

    converter = HfConverter(max_shard_bytes=30_000).build()
    converter.write(tmp_path / "ours", folder)
    again = converter.read(tmp_path / "ours")
    assert meaning_of(again.model) == meaning_of(folder.model)
    assert again.facts.special_tokens == folder.facts.special_tokens == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    before, after = folder.read(list(folder.tensors)), again.read(list(again.tensors))
    assert before.keys() == after.keys()
    assert all(before[name].dtype == after[name].dtype and torch.equal(before[name], after[name]) for name in before)
    found = converter.reference(tmp_path / "ours", tokens())
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, expected)  # transformers makes the very same model of what we wrote
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert written["model_type"] == kind
    assert (tmp_path / "ours" / "model.safetensors.index.json").exists()

    if keys.get("rope_scaling", {}).get("rope_type") == "dynamic":
        return  # greedy text below stays within its original length
    prompt = tokens(1, 9)
    text = reference.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert generate(ours, prompt.tolist(), max_tokens=20)[0] == text[0, 9:].tolist()


PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    # Keys of mistralai/Mixtral-8x7B-v0.1, Qwen/Qwen3-30B-A3B and deepseek-ai/DeepSeek-V3, as they were published.
    "mixtral": (
        46_702_792_704,
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1000000.0}
        | {"vocab_size": 32000, "max_position_embeddings": 32768, "sliding_window": None, "rms_norm_eps": 1e-05}
        | {"output_router_logits": False, "router_aux_loss_coef": 0.02, "hidden_act": "silu", "attention_dropout": 0.0},
    ),
    "qwen3_moe": (
        30_532_122_624,
        {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32}
        | {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
        | {"moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [], "max_window_layers": 48}
        | {"use_sliding_window": False, "sliding_window": None, "rope_theta": 1000000.0, "rope_scaling": None}
        | {"vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-06, "attention_bias": False}
        | {"router_aux_loss_coef": 0.001, "tie_word_embeddings": False},
    ),
    # Keys of nvidia/Nemotron-H-8B-Base-8K; the number is that of transformers for them.
    "nemotron_h": (
        8_100_852_736,
        {"hidden_size": 4096, "intermediate_size": 21504, "num_hidden_layers": 52, "num_attention_heads": 32}
        | {"hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "num_key_value_heads": 8}
        | {"attention_head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128}
        | {"conv_kernel": 4, "expand": 2, "chunk_size": 128, "mlp_hidden_act": "relu2", "mamba_hidden_act": "silu"}
        | {"layer_norm_epsilon": 1e-05, "rms_norm_eps": 1e-05, "vocab_size": 131072, "max_position_embeddings": 8192}
        | {"time_step_min": 0.001, "time_step_max": 0.1, "time_step_floor": 0.0001, "time_step_rank": 256}
        | {"use_bias": False, "use_conv_bias": True, "mamba_proj_bias": False, "mlp_bias": False, "attention_bias": False}
        | {"sliding_window": None, "tie_word_embeddings": False, "residual_in_fp32": False, "num_logits_to_keep": 1},
    ),
    # Keys of the text part of meta-llama/Llama-4-Scout-17B-16E; the number is that of transformers for them.
    "llama4_text": (
        107_769_861_120,
        {"hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_hidden_layers": 48}
        | {"num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 16, "hidden_act": "silu"}
        | {"num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "moe_layers": list(range(48)), "use_qk_norm": True}
        | {"no_rope_layers": [1, 1, 1, 0] * 12, "attention_chunk_size": 8192, "attn_temperature_tuning": 4, "attn_scale": 0.1}
        | {"floor_scale": 8192, "for_llm_compressor": False, "vocab_size": 202048, "max_position_embeddings": 262144}
        | {"rope_theta": 500000.0, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "rms_norm_eps": 1e-05}
        | {
            "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            | {"original_max_position_embeddings": 8192}
        }
        | {"attention_bias": False, "attention_dropout": 0.0, "output_router_logits": False, "tie_word_embeddings": False},
    ),
    # Keys of moonshotai/Kimi-Linear-48B-A3B-Instruct; the number is that of transformers for them.
    "kimi_linear": (
        49_122_675_072,
        {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 27, "num_attention_heads": 32, "head_dim": 72}
        | {"num_key_value_heads": 32, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
        | {"v_head_dim": 128, "mla_use_nope": True, "first_k_dense_replace": 1, "moe_intermediate_size": 1024}
        | {
            "linear_attn_config": {"head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4}
            | {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "kda_layers": [at for at in range(1, 27) if at % 4]}
        }
        | {"moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_expert_group": 1}
        | {"num_experts": 256, "num_experts_per_token": 8, "num_shared_experts": 1, "topk_group": 1, "use_grouped_topk": True}
        | {"routed_scaling_factor": 2.446, "num_nextn_predict_layers": 0, "model_max_length": 1048576, "rms_norm_eps": 1e-05}
        | {"rope_theta": 10000.0, "rope_scaling": None, "vocab_size": 163840, "tie_word_embeddings": False},
    ),
    "deepseek_v3": (
        671_026_404_352,
        {"hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128}
        | {"num_key_value_heads": 128, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128}
        | {"qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1, "n_group": 8}
        | {"topk_group": 4, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3}
        | {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True}
        | {"routed_scaling_factor": 2.5, "ep_size": 1, "num_nextn_predict_layers": 1, "vocab_size": 129280}
        | {"max_position_embeddings": 163840, "rms_norm_eps": 1e-06, "rope_theta": 10000, "attention_bias": False}
        | {
            "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
            | {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
        },
    ),
    # Keys of MiniMaxAI/MiniMax-M2 without those of its fp8 weights; the size is the sum of the shapes of its parts.
    "minimax_m2": (
        2 * 200064 * 3072
        + 62 * (2 * 3072 * 6144 + 2 * 3072 * 1024 + 6144 + 1024)
        + 62 * (256 * 3072 + 256 * 3 * 3072 * 1536 + 2 * 3072)
        + 3072,
        {"hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62, "num_attention_heads": 48}
        | {"num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 256, "num_experts_per_tok": 8, "rotary_dim": 64}
        | {"rope_theta": 5000000, "vocab_size": 200064, "max_position_embeddings": 196608, "rms_norm_eps": 1e-06}
        | {"attn_type_list": [1] * 62, "scoring_func": "sigmoid", "use_qk_norm": True, "qk_norm_type": "per_layer"}
        | {"use_routing_bias": True, "shared_intermediate_size": 0, "num_mtp_modules": 3, "mtp_transformer_layers": 1}
        | {"use_mtp": True, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "output_router_logits": False},
    ),
}
# deepseek-ai/DeepSeek-V3.2-Exp has the other keys of DeepSeek-V3, and of each layer an indexer: wq_b, wk, k_norm, weights_proj.
PUBLISHED["deepseek_v32"] = (
    671_026_404_352 + 61 * (64 * 128 * 1536 + 128 * 7168 + 2 * 128 + 64 * 7168),
    PUBLISHED["deepseek_v3"][1] | {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048},
)


# Keys of deepseek-ai/DeepSeek-V4-Flash without those of its fp8 and fp4 weights; the number is that of transformers for them.
PUBLISHED["deepseek_v4"] = (
    284_332_230_231,
    {"hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512}
    | {"q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024, "qk_rope_head_dim": 64, "sliding_window": 128}
    | {"compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "index_head_dim": 128, "index_n_heads": 64, "index_topk": 512}
    | {"hc_eps": 1e-06, "hc_mult": 4, "hc_sinkhorn_iters": 20, "moe_intermediate_size": 2048, "n_routed_experts": 256}
    | {"n_shared_experts": 1, "num_experts_per_tok": 6, "norm_topk_prob": True, "scoring_func": "sqrtsoftplus"}
    | {"topk_method": "noaux_tc", "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "num_nextn_predict_layers": 1}
    | {"num_hash_layers": 3, "max_position_embeddings": 1048576, "rope_theta": 10000, "compress_rope_theta": 160000}
    | {
        "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536}
        | {"beta_fast": 32, "beta_slow": 1}
    }
    | {"rms_norm_eps": 1e-06, "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "vocab_size": 129280}
    | {"initializer_range": 0.02, "tie_word_embeddings": False},
)

# The text part of meta-llama/Llama-4-Maverick-17B-128E differs in these.
MAVERICK = {"num_local_experts": 128, "interleave_moe_layer_step": 2, "moe_layers": list(range(1, 48, 2)), "use_qk_norm": False}
PUBLISHED["llama4_text-maverick"] = (
    400_711_848_960,
    PUBLISHED["llama4_text"][1] | MAVERICK | {"no_rope_layers": [], "rope_scaling": None, "max_position_embeddings": 1048576},
)


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_configurations_give_the_published_sizes(kind: str) -> None:
    parameters, keys = PUBLISHED[kind]
    kind = kind.partition("-")[0]
    decoder = decoder_of(FAMILIES[kind], {"model_type": kind, **keys}, "here")
    assert sum(prod(shape) for shape in shapes_of(decoder).values()) == parameters
    assert misfits(FAMILIES[kind], decoder) == []


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("mixtral", "router_jitter_noise", 0.1),
        ("mixtral", "shared_expert_intermediate_size", 16),
        ("mixtral", "num_experts", 7),
        ("qwen3_moe", "mlp_only_layers", [1]),
        ("qwen3_moe", "num_experts_per_tok", 0),
        ("qwen2_moe", "shared_expert_intermediate_size", 30),
        ("qwen2_moe", "shared_expert_intermediate_size", None),
        ("qwen2_moe", "mlp_only_layers", [2]),
        ("qwen2_moe", "layer_types", ["full_attention"] * 3),
        ("qwen2_moe", "attention_bias", True),
        ("gpt_neox", "hidden_act", "relu"),
        ("gpt_neox", "num_key_value_heads", 2),
        ("gpt_neox", "rotary_pct", 0),
        ("gpt_neox", "rotary_pct", 1.5),
        ("gpt_neox", "rotary_emb_base", "10000"),
        ("gpt_neox", "rope_theta", 300.0),
        ("gpt_neox", "partial_rotary_factor", 0.75),
        ("gpt_neox", "rms_norm_eps", 1e-6),
        ("gpt_neox", "use_parallel_residual", 1),
        ("gpt_oss", "swiglu_limit", -1.0),
        ("gpt_oss", "layer_types", ["full_attention"] * 3),
        ("gpt_oss", "sliding_window", None),
        ("gpt_oss", "experts_per_token", 2),
        ("gpt_oss", "quantization_config", {"quant_method": "fp8"}),
        ("gpt_oss", "quantization_config", "mxfp4"),
        ("llama", "quantization_config", {"quant_method": "mxfp4"}),
        ("gpt_oss", "num_experts_per_tok", None),
        ("qwen3_next", "layer_types", ["full_attention"] * 3),
        ("qwen3_next", "layer_types", ["sliding_attention"] * 4),
        ("qwen3_next", "full_attention_interval", 0),
        ("qwen3_next", "linear_num_key_heads", 0),
        ("qwen3_next", "linear_conv_kernel_dim", None),
        ("qwen3_next", "use_sliding_window", True),
        ("qwen3_5_text", "layer_types", ["full_attention"] * 3),
        ("qwen3_5_text", "linear_num_key_heads", 0),
        ("qwen3_5_text", "attn_output_gate", False),
        ("qwen3_5_moe_text", "norm_topk_prob", False),
        ("qwen3_5_moe_text", "shared_expert_intermediate_size", 30),
        ("qwen3_5_moe_text", "mlp_only_layers", [0]),
        ("minimax_m2", "attn_type_list", [1, 0, 1, 1]),
        ("minimax_m2", "rotary_dim", 17),
        ("minimax_m2", "rotary_dim", 0),
        ("minimax_m2", "scoring_func", "softmax"),
        ("minimax_m2", "shared_intermediate_size", 16),
        ("minimax_m2", "sliding_window", 6),
        ("minimax_m2", "router_jitter_noise", 0.1),
        ("ministral3", "attention_bias", True),
        ("ministral3", "layer_types", ["full_attention"] * 4),
        ("ministral3", "hidden_act", "gelu"),
        ("ministral3", "head_dim", -1),
        ("ministral3", "rope_parameters", "yarn"),
        ("cohere", "use_qk_norm", True),
        ("cohere", "hidden_act", "gelu"),
        ("cohere", "logit_scale", None),
        ("cohere", "sliding_window", 6),
        ("cohere", "rms_norm_eps", 1e-6),
        ("cohere2", "use_qk_norm", True),
        ("cohere2", "use_parallel_block", False),
        ("cohere2", "position_embedding_type", "alibi"),
        ("cohere2", "rotary_pct", 0.5),
        ("cohere2", "head_dim", 16),
        ("cohere2", "sliding_window", None),
        ("cohere2", "layer_types", ["full_attention"] * 3),
        ("cohere2", "sliding_window_pattern", 0),
        ("cohere2", "logit_scale", -1.0),
        ("cohere2", "use_embedding_sharing", False),
        ("gpt2", "activation_function", "swish"),
        ("gpt2", "activation_function", ["gelu_new"]),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True),
        ("gpt2", "add_cross_attention", True),
        ("gpt2", "n_ctx", 32),
        ("gpt2", "n_inner", -1),
        ("gpt2", "n_positions", 0),
        ("gpt2", "layer_norm_epsilon", None),
        ("gpt2", "embd_pdrop", 0.3),
        ("gpt2", "rope_theta", 10000.0),
        ("gpt2", "num_key_value_heads", 2),
        ("gpt2", "hidden_size", 64),
        ("olmo_hybrid", "layer_types", ["full_attention", "linear_attention"] * 2),
        ("olmo_hybrid", "layer_types", ["linear_attention"] * 5),
        ("olmo_hybrid", "layer_types", ["sliding_attention", "full_attention"] * 2 + ["full_attention"]),
        ("olmo_hybrid", "full_attention_interval", 2),
        ("olmo_hybrid", "linear_num_key_heads", -1),
        ("olmo_hybrid", "linear_conv_kernel_dim", 0),
        ("olmo_hybrid", "linear_allow_neg_eigval", 2),
        ("olmo_hybrid", "sliding_window", 6),
        ("nemotron_h", "layers_block_type", ["mlp", "linear_attention", "full_attention", "mlp"]),
        ("nemotron_h", "layers_block_type", ["linear_attention", "mlp", "mlp", "full_attention"]),
        ("nemotron_h", "layers_block_type", ["linear_attention", "mlp", "sliding_attention", "mlp"]),
        ("nemotron_h", "layers_block_type", []),
        ("nemotron_h", "num_hidden_layers", 5),
        ("nemotron_h", "mlp_hidden_act", "silu"),
        ("nemotron_h", "mamba_hidden_act", "gelu"),
        ("nemotron_h", "sliding_window", 4),
        ("nemotron_h", "tie_word_embeddings", True),
        ("nemotron_h", "attention_bias", True),
        ("nemotron_h", "rope_theta", 10000.0),
        ("nemotron_h-experts-biases", "n_shared_experts", 2),
        ("nemotron_h-experts-biases", "mlp_bias", True),
        ("nemotron_h-experts-biases", "moe_shared_expert_intermediate_size", 30),
        ("kimi_linear", "mla_use_nope", False),
        ("kimi_linear", "moe_router_activation_func", "softmax"),
        ("kimi_linear", "moe_layer_freq", 2),
        ("kimi_linear", "use_grouped_topk", False),
        ("kimi_linear", "rope_scaling", {"rope_type": "linear", "factor": 2.0}),
        ("kimi_linear", "tie_word_embeddings", True),
        ("kimi_linear", "attention_bias", True),
        ("kimi_linear", "hidden_act", "gelu"),
        ("kimi_linear", "num_key_value_heads", 2),
        ("kimi_linear", "topk_group", 9),
        ("kimi_linear", "qk_head_dim", 15),
        ("kimi_linear", "num_nextn_predict_layers", 1),
        ("kimi_linear", "num_experts", 9),
        ("kimi_linear", "layer_types", ["full_attention"] * 3),
        ("kimi_linear", "layer_types", ["sliding_attention"] * 4),
        ("kimi_linear", "mlp_layer_types", ["sparse"] * 3),
        ("kimi_linear", "mlp_layer_types", ["sparse", "sparse", "dense", "sparse"]),
        ("kimi_linear", "linear_attn_config", [4]),
        ("kimi_linear", "linear_attn_config.gate_lower_bound", -5.0),
        ("kimi_linear", "linear_attn_config.num_heads", 0),
        ("kimi_linear", "linear_attn_config.full_attn_layers", "4"),
        ("kimi_linear-published-names-latent-queries-every-second-sparse", "first_k_dense_replace", 1),
        ("kimi_linear-published-names-latent-queries-every-second-sparse", "layer_types", ["linear_attention"] * 4),
        ("gemma4_text", "layer_types", ["sliding_attention"] * 7),
        ("gemma4_text", "layer_types", ["full_attention"] * 6),
        ("gemma4_text", "layer_types", ["linear_attention"] * 6 + ["full_attention"]),
        ("gemma4_text", "use_bidirectional_attention", "all"),
        ("gemma4_text", "num_kv_shared_layers", 2),
        ("gemma4_text", "num_kv_shared_layers", 9),
        ("gemma4_text-inputs-shared-wider", "num_kv_shared_layers", 6),
        ("gemma4_text-inputs-shared-wider", "vocab_size_per_layer_input", 96),
        ("gemma4_text-inputs-shared-wider", "hidden_size_per_layer_input", -1),
        ("gemma4_text-experts-inputs-shared", "use_double_wide_mlp", True),
        ("gemma4_text-experts", "intermediate_size", 40),
        ("gemma4_text-experts", "num_experts", None),
        ("gemma4_text-experts", "top_k_experts", 0),
        ("gemma4_text-experts", "num_experts_per_tok", 2),
        ("gemma4_text", "hidden_activation", "silu"),
        ("gemma4_text", "global_head_dim", None),
        ("gemma4_text", "rope_theta", 10000.0),
        ("gemma4_text", "sliding_window", None),
        ("gemma4_text", "attn_logit_softcapping", 5.0),
        ("gemma4_text", "query_pre_attn_scalar", 24),
        ("llama4_text", "attention_chunk_size", None),
        ("llama4_text", "attention_chunk_size", 0),
        ("llama4_text", "layer_types", ["chunked_attention"] * 3),
        ("llama4_text", "layer_types", ["sliding_attention"] * 4),
        ("llama4_text", "no_rope_layers", [1, 1]),
        ("llama4_text", "no_rope_layer_interval", 0),
        ("llama4_text", "moe_layers", [0, 1, 3]),
        ("llama4_text", "moe_layers", [4]),
        ("llama4_text", "moe_layers", 2),
        ("llama4_text", "interleave_moe_layer_step", 0),
        ("llama4_text", "attn_temperature_tuning", 3),
        ("llama4_text", "floor_scale", 0),
        ("llama4_text", "attn_scale", -0.1),
        ("llama4_text", "hidden_act", "gelu"),
        ("llama4_text", "router_jitter_noise", 0.1),
        ("llama4_text", "for_llm_compressor", True),
        ("llama4_text", "sliding_window", 6),
        ("llama4_text", "num_experts_per_tok", 0),
        ("glm4_moe", "topk_group", 9),
        ("glm4_moe", "n_routed_experts", 0),
        ("glm4_moe", "scoring_func", "softmax"),
        ("glm4_moe", "mlp_bias", True),
        ("deepseek_v3", "scoring_func", "softmax"),
        ("deepseek_v3", "topk_method", "greedy"),
        ("deepseek_v3", "moe_layer_freq", 2),
        ("deepseek_v3", "rope_interleave", False),
        ("deepseek_v3", "attention_bias", True),
        ("deepseek_v3", "num_key_value_heads", 2),
        ("deepseek_v3", "topk_group", 9),
        ("deepseek_v3", "first_k_dense_replace", -1),
        ("deepseek_v3", "head_dim", 128),
        ("deepseek_v32", "q_lora_rank", None),
        ("deepseek_v32", "index_topk", 0),
        ("deepseek_v32", "index_n_heads", None),
        ("deepseek_v32", "layer_types", ["full_attention"] * 4),
        ("deepseek_v32", "mlp_layer_types", ["sparse"] * 4),
        ("deepseek_v32", "mlp_bias", True),
    ],
)
def test_a_key_that_is_not_implemented_is_refused_by_name(kind: str, key: str, value: Any) -> None:
    kind, keys = CASES[kind]
    table, _, entry = key.partition(".")
    with pytest.raises(ConfigError) as refusal:
        decoder_of(FAMILIES[kind], sizes_of(kind) | keys | {table: {entry: value} if entry else value}, "here")
    assert [fault.key for fault in refusal.value.faults] == [key]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders as transformers writes them, two layers each."""
    root, fewer = tmp_path_factory.mktemp("experts"), {"num_hidden_layers": 2}
    return {kind: saved(random_model(kind, CASES[kind][1] | fewer), root / kind) for kind in ("mixtral", "deepseek_v3")}


def changed(original: Path, target: Path, change: Any) -> Path:
    shutil.copytree(original, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


EXPERT = "model.layers.1.block_sparse_moe.experts.2.w1.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(EXPERT), f"{EXPERT}: missing"),
        (lambda t: t.update({EXPERT: torch.zeros(3, 4)}), rf"{EXPERT}: shape \(3, 4\)"),
        (lambda t: t.update({EXPERT: t[EXPERT].bfloat16()}), "different dtypes"),
        (lambda t: t.update({EXPERT.replace("experts.2", "experts.4"): t[EXPERT].clone()}), r"experts\.4"),
    ],
)
def test_experts_must_be_exactly_those_of_the_model(
    originals: dict[str, Path], tmp_path: Path, change: Any, message: str
) -> None:
    with pytest.raises(Unsupported, match=message):
        Folder(changed(originals["mixtral"], tmp_path / "model", change))


def test_experts_of_any_width_are_compared_with_transformers(tmp_path: Path) -> None:
    """Its grouped products refuse widths that are no multiple of 16 bytes; a conversion ended in that error."""
    theirs = random_model("qwen3_moe", CASES["qwen3_moe"][1] | {"moe_intermediate_size": 18, "num_hidden_layers": 1})
    folder = saved(theirs, tmp_path)
    found = HfConverter().build().reference(folder, tokens())
    with torch.no_grad():
        assert torch.equal(found, theirs(tokens()).logits)


def test_layers_of_multi_token_prediction_are_left_out(originals: dict[str, Path], tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.2.eh_proj.weight"] = torch.zeros(3)

    plain, more = Folder(originals["deepseek_v3"]), Folder(changed(originals["deepseek_v3"], tmp_path / "model", change))
    assert plain.tensors == more.tensors
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 0}))
    with pytest.raises(Unsupported, match=r"model\.layers\.2\.eh_proj"):
        Folder(tmp_path / "model")


def test_boxes_of_stacked_and_turned_tensors_equal_the_whole(originals: dict[str, Path]) -> None:
    folder = Folder(originals["deepseek_v3"])
    names = ("blocks.1.mlp.experts.down_proj", "blocks.1.attention.q_b_proj.weight", "blocks.1.mlp.router.bias")
    for name, offset, extent in zip(names, ((2, 3, 4), (5, 1), (3,)), ((3, 9, 7), (20, 6), (4,)), strict=True):
        whole = folder.read([name])[name]
        box = tuple(slice(start, start + size) for start, size in zip(offset, extent, strict=True))
        assert torch.equal(folder.box(name, offset, extent), whole[box])
        assert folder.tensors[name].shape == tuple(whole.shape)


DENSE = DecoderConfig(dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=48, vocab_size=97, max_length=64)


@pytest.mark.parametrize(
    ("moe", "message"),
    [
        (MoEConfig(capacity=1.0), "moe.capacity"),
        (MoEConfig(router=HashConfig()), "moe.router"),
        (MoEConfig(router=SigmoidTopKConfig()), "moe.router"),
        (MoEConfig(shared=1), "moe.shared"),
        (MoEConfig(first_dense=1), "moe.layers"),
        (None, "moe"),
    ],
)
def test_what_a_family_cannot_say_is_named(moe: MoEConfig | None, message: str) -> None:
    assert any(message in fault for fault in misfits(FAMILIES["mixtral"], replace(DENSE, moe=moe)))
    assert misfits(FAMILIES["llama"], replace(DENSE, moe=moe)) or moe is None


def test_what_only_training_reads_is_no_part_of_a_model() -> None:
    one = replace(DENSE, moe=MoEConfig(router=SigmoidTopKConfig(bias_rate=0.5), losses=Losses(z=1.0), kernel="loop"))
    other = replace(DENSE, moe=MoEConfig(router=SigmoidTopKConfig(), ffn_dim=48))
    assert meaning_of(one) == meaning_of(other)
    assert issubclass(Unsupported, ForgeError)
