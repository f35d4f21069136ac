"""StableLM 3B and 2 (Bellagente et al., 2024): layer norms with biases, and a part of each head that turns."""

from forge_models.hf.family import Family
from forge_models.hf.ignorable import Same

STABLELM = Family(
    model_type="stablelm",
    architecture="StableLmForCausalLM",
    defaults={
        "num_key_value_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "use_qkv_bias": False,
    },
    qkv_bias="use_qkv_bias",
    layer_norm=True,
    partial=0.25,
    ignores={
        "norm_eps": (Same("layer_norm_eps"),),
        "rope_pct": (Same("partial_rotary_factor"),),
        "rotary_scaling_factor": (1,),
    },
)
