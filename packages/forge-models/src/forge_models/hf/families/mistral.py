"""Mistral (Jiang et al., 2023): the Llama shape with a window in every layer."""

from forge_models.hf.family import Family
from forge_models.hf.ignorable import Same

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "sliding_window": 4096,
    },
    qkv_bias=False,
    windows="all",
    ignores={"norm_eps": (Same("rms_norm_eps"),)},
)
