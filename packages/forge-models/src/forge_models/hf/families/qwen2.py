"""Qwen2 and 2.5 (Yang et al., 2024): biases of q, k and v; a window in the upper layers when switched on."""

from forge_models.hf.family import Family

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    defaults={
        "num_key_value_heads": 32,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    qkv_bias=True,
    windows="layers",
)
