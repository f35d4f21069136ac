"""OLMo-2 (OLMo et al., 2024): norms after each part, and of the whole q and k."""

from forge_models.hf.family import Family

OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    defaults={
        "num_key_value_heads": None,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": False,
    },
    parts={
        "attention": "self_attn",
        "mlp": "mlp",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
    placement="post",
    qk_norm="full",
)
