"""Tiny random models of transformers, one per family and option, and what the tests ask of them."""

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

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

GEMMA: dict[str, Any] = {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24}

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

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
    "gemma3": ("gemma3_text", GEMMA | {"num_hidden_layers": 7}),
    "gemma3-untied-linear": (
        "gemma3_text",
        GEMMA | {"tie_word_embeddings": False, "rope_scaling": {"rope_type": "linear", "factor": 4.0}, "num_hidden_layers": 7},
    ),
}
"""Name of a case -> (model_type, keys of the configuration)."""


def random_model(kind: str, keys: dict[str, Any], seed: int = 0) -> torch.nn.Module:
    """A model of transformers whose weights are spread, so that every part of it shows in the logits."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **(SIZES | keys))
    config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(drawn * 0.2)
            else:
                parameter.add_(drawn * 0.3)
    return model


def saved(model: torch.nn.Module, folder: Path, **options: Any) -> Path:
    """The folder as transformers writes it."""
    model.save_pretrained(folder, **options)  # type: ignore[operator]
    return folder


def tokens(rows: int = 2, length: int = 40, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, SIZES["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))
