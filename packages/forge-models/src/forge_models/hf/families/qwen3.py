"""Qwen3, dense (Yang et al., 2025): norms of each head's q and k."""

from typing import Any, ClassVar

from forge_models.components.attentions import GQA
from forge_models.components.decoder import Decoder
from forge_models.hf.base import read_base, read_biases, read_heads, write_base, write_biases
from forge_models.hf.config import Keys
from forge_models.hf.families.qwen2 import read_upper_windows, write_upper_windows
from forge_models.hf.family import Family


class Qwen3(Family):
    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }

    def read(self, keys: Keys) -> dict[str, Any]:
        fields = read_base(keys) | read_heads(keys)
        return fields | {"attention": GQA(**read_biases(keys), qk_norm="head", **read_upper_windows(keys))}

    def write(self, decoder: Decoder) -> dict[str, Any]:
        return write_base(self, decoder) | write_biases(decoder) | write_upper_windows(decoder)
