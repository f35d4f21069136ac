"""Gemma-3, text (Gemma Team, 2025): norms of q and k, five local layers to one global, each kind with its own base."""

from forge_models.hf.families.gemma2 import SANDWICH
from forge_models.hf.family import Family

GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "final_logit_softcapping": None,
    },
    parts=SANDWICH,
    placement="sandwich",
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    qk_norm="head",
    norm_offset=1,
    scaled_embedding=True,
    windows="layers",
    period=6,
    gemma=True,
    local_theta=10_000.0,
    local_key="rope_local_base_freq",
    theta=1_000_000.0,
    ignores={"attn_logit_softcapping": (None,)},  # the reference reads it and applies no cap: which holds is not clear
)
