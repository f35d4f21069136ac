"""Mistral (Jiang et al., 2023): the Llama shape with a window in every layer."""

from typing import Any, ClassVar

from forge_models.components.attentions import GQA
from forge_models.components.decoder import Decoder
from forge_models.hf.base import read_base, read_heads, write_base
from forge_models.hf.config import Keys
from forge_models.hf.family import Family
from forge_models.hf.ignorable import Same
from forge_models.hf.windows import read_window, write_window


class Mistral(Family):
    model_type = "mistral"
    architecture = "MistralForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "sliding_window": 4096,
    }
    ignores: ClassVar = {"norm_eps": (Same("rms_norm_eps"),)}

    def read(self, keys: Keys) -> dict[str, Any]:
        fields = read_base(keys) | read_heads(keys)
        return fields | {"attention": GQA(window=read_window(keys))}

    def write(self, decoder: Decoder) -> dict[str, Any]:
        return write_base(self, decoder) | write_window(decoder)
