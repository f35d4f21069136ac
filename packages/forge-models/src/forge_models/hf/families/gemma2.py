"""Gemma-2 (Gemma Team, 2024): norms on both sides, soft caps, every other layer local."""

from types import MappingProxyType

from forge_models.hf.family import Family

SANDWICH = MappingProxyType(
    {
        "attention": "self_attn",
        "mlp": "mlp",
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
)
"""Part of a block -> its name in a layer, for norms on both sides."""

GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    parts=SANDWICH,
    placement="sandwich",
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    norm_offset=1,
    scaled_embedding=True,
    windows="layers",
    period=2,
    gemma=True,
    attention_cap=True,
)
