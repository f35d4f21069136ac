"""Configurations as they were published, and tiny models of the same kinds.

`published.json` holds keys and values of well-known models with the number of their parameters (buffers not counted), and
configurations that are refused, with the key that is to blame (their long lists are cut short).
"""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from models.hf.zoo import saved

PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
READ: dict[str, dict[str, Any]] = PUBLISHED["read"]
REFUSED: dict[str, dict[str, Any]] = PUBLISHED["refused"]

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 12,
    "global_head_dim": 20,
    "vocab_size_per_layer_input": 103,
    "hidden_size_per_layer_input": 6,
    "num_global_key_value_heads": 4,
    "sliding_window": 5,
    "sliding_window_size": 5,
    "sliding_window_pattern": 2,
    "max_window_layers": 2,
    "num_local_experts": 5,
    "num_experts": 8,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "experts_per_token": 2,
    "moe_intermediate_size": 20,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "full_attention_interval": 2,
    "shared_expert_intermediate_size": 40,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 8,
    "v_head_dim": 7,
    "n_group": 4,
    "topk_group": 2,
    "n_embd": 32,
    "n_inner": 48,
    "n_layer": 3,
    "n_head": 4,
    "n_ctx": 64,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Key -> its value in a tiny model, where a configuration gives it a value other than null, 1 or true."""

IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
NAMES = ("_name_or_path", "transformers_version", "torch_dtype", "initializer_range", *IDS)
"""Keys in which configurations of one variant differ."""


def tiny(values: dict[str, Any]) -> dict[str, Any]:
    """The same configuration, smaller; key and value heads are as many, half as many or one, as they were."""
    inputs = ("vocab_size_per_layer_input", "hidden_size_per_layer_input")
    small = {
        key: TINY[key] if key in TINY and key not in inputs and value not in (None, 1) else value for key, value in values.items()
    }
    heads, kv_heads = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if kv_heads is not None:
        small["num_key_value_heads"] = 4 if kv_heads == heads else 1 if kv_heads == 1 else 2
    for listed in {"layer_types", "no_rope_layers"} & set(small):
        small[listed] = values[listed][-3:]
    if {"partial_rotary_factor", "rotary_pct"} & set(small):
        small["hidden_size"] = 64
        small |= {"head_dim": 16} if "head_dim" in small else {}
    if values.get("enable_moe_block"):  # its dense part is a number of experts
        small["intermediate_size"] = 2 * small["moe_intermediate_size"]
    small |= {key: TINY[key] for key in inputs if values.get(key)}
    if values.get("num_kv_shared_layers"):
        kinds = ["sliding_attention", "full_attention"]
        small |= {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": 2 * kinds}
    return small


def variants() -> dict[str, dict[str, Any]]:
    """Tiny configurations by the name of the first model that has each."""
    found: dict[str, dict[str, Any]] = {}
    seen = set()
    for name, entry in READ.items():
        if "quantization_config" in entry["config"]:  # its tensors are in a format of their own, see test_mxfp4.py
            continue
        small = tiny(entry["config"])
        variant = json.dumps({key: value for key, value in small.items() if key not in NAMES}, sort_keys=True)
        if variant not in seen:
            found[name] = small
        seen.add(variant)
    return found


def reference(values: dict[str, Any]) -> torch.nn.Module:
    """The model that transformers makes of a configuration in fp32, its parameters as they come."""
    from transformers import AutoConfig, AutoModelForCausalLM

    given = {key: value for key, value in values.items() if key != "auto_map"}
    config = AutoConfig.for_model(**deepcopy(given))  # it writes into tables
    config._attn_implementation = config._experts_implementation = "eager"
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@torch.no_grad()
def spread(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """In fp64, with random parameters and biases of routing, so that every part shows in the logits."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in (*model.double().named_parameters(), *model.named_buffers()):
        if isinstance(tensor, torch.nn.Parameter) and tensor.dim() > 1:
            tensor.copy_(0.2 * torch.randn(tensor.shape, generator=generator))
        elif isinstance(tensor, torch.nn.Parameter) or name.endswith("e_score_correction_bias"):
            tensor.add_(0.3 * torch.randn(tensor.shape, generator=generator))
    return model.eval()


def folder_of(model: torch.nn.Module, values: dict[str, Any], path: Path, **options: Any) -> Path:
    """The model's tensors as transformers saves them, beside a configuration as it was published."""
    saved(model, path, **options)
    (path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return path
