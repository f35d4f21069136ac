"""Phi-3 and 4 (Abdin et al., 2024): the Mistral shape with q, k, v in one matrix, gate and up in another; angles not scaled."""

from forge_models.hf.family import Family
from forge_models.hf.ignorable import ANY, NONE, OFF

PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    defaults={
        "num_key_value_heads": None,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "sliding_window": None,
    },
    qkv_bias=False,
    windows="all",
    partial=1.0,
    scaled=False,
    fused={"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")},
    ignores={
        "attention_bias": OFF,
        "embd_pdrop": NONE,
        "resid_pdrop": NONE,
        "original_max_position_embeddings": ANY,  # read by longrope alone
    },
)
