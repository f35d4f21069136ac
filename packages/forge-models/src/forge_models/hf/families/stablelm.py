"""StableLM 3B and 2 (Bellagente et al., 2024): layer norms with biases, and rotation of a part of each head."""

from typing import Any, ClassVar

from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.layers import LayerNormConfig
from forge_models.hf.config import Keys, Same
from forge_models.hf.family import Family, read_base, read_heads, write_base
from forge_models.hf.rope import PARTIAL

EPS = "layer_norm_eps"


class StableLM(Family):
    model_type = "stablelm"
    architecture = "StableLmForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": 32,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "use_qkv_bias": False,
    }
    ignores: ClassVar = {
        "norm_eps": (Same("layer_norm_eps"),),
        "rope_pct": (Same("partial_rotary_factor"),),
        "rotary_scaling_factor": (1,),
    }

    def read(self, keys: Keys) -> dict[str, Any]:
        fields = read_base(keys, eps=EPS, partial=0.25) | read_heads(keys)
        return fields | {"norm": LayerNormConfig(eps=keys.number(EPS)), "attention": GQA(qkv_bias=keys.boolean("use_qkv_bias"))}

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        written = write_base(self, decoder, eps=EPS) | {PARTIAL: decoder.rope.partial}
        return written | {"use_qkv_bias": getattr(decoder.shape.attention, "qkv_bias", False)}
