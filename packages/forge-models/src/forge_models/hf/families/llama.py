"""Llama 1 to 3.x (Touvron et al., 2023; Grattafiori et al., 2024)."""

from forge_models.hf.family import Family
from forge_models.hf.ignorable import ANY, Same

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    defaults={
        "num_key_value_heads": None,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    },
    mlp_bias=True,
    ignores={
        "is_llama_config": (True,),
        "activation": ("swiglu",),  # Falcon3
        "norm_eps": (Same("rms_norm_eps"),),
        "pretraining_tp": ANY,  # parts in which products were once summed
    },
)
