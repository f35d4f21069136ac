"""Llama 1 to 3.x (Touvron et al., 2023; Grattafiori et al., 2024)."""

from typing import Any, ClassVar

from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.layers import SwiGLU
from forge_models.hf.config import ANY_VALUE, Keys, Same
from forge_models.hf.family import Family, read_base, read_biases, read_heads, write_base, write_biases


class Llama(Family):
    model_type = "llama"
    architecture = "LlamaForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": None,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    }
    ignores: ClassVar = {
        "is_llama_config": (True,),
        "activation": ("swiglu",),  # Falcon3
        "norm_eps": (Same("rms_norm_eps"),),
        "pretraining_tp": ANY_VALUE,  # number of parts in which products were once summed
    }

    def read(self, keys: Keys) -> dict[str, Any]:
        fields = read_base(keys) | {"mlp": SwiGLU(bias=keys.boolean("mlp_bias"))} | read_heads(keys)
        return fields | {"attention": GQA(**read_biases(keys))}

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        mlp_bias = getattr(decoder.shape.mlp, "bias", False)
        return write_base(self, decoder) | write_biases(decoder) | {"mlp_bias": mlp_bias}
