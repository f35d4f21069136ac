"""OLMo-2 (OLMo et al., 2024): norms after each part, and of the whole q and k."""

from typing import Any, ClassVar

from forge_models.components.attentions import GQA
from forge_models.components.decoder import Decoder
from forge_models.hf.base import read_base, read_biases, read_heads, write_base, write_biases
from forge_models.hf.config import Keys
from forge_models.hf.family import Family


class Olmo2(Family):
    model_type = "olmo2"
    architecture = "Olmo2ForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": None,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }
    parts: ClassVar = {
        "attention": "self_attn",
        "mlp": "mlp",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }

    def read(self, keys: Keys) -> dict[str, Any]:
        fields = read_base(keys) | read_heads(keys)
        return fields | {"norm_placement": "post", "attention": GQA(**read_biases(keys), qk_norm="full")}

    def write(self, decoder: Decoder) -> dict[str, Any]:
        return write_base(self, decoder) | write_biases(decoder)
