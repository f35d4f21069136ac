"""Phi-3 and 4 (Abdin et al., 2024): the Mistral architecture with q, k, v in one matrix, gate, up in another; no rope scaling."""

from typing import Any, ClassVar

from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig
from forge_models.hf.config import ABSENT_OR_FALSE, ABSENT_OR_ZERO, ANY_VALUE, Keys
from forge_models.hf.family import Family, read_base, read_heads, write_base
from forge_models.hf.layers import read_window, write_window
from forge_models.hf.rope import PARTIAL


class Phi3(Family):
    model_type = "phi3"
    architecture = "Phi3ForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": None,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "sliding_window": None,
    }
    ignores: ClassVar = {
        "attention_bias": ABSENT_OR_FALSE,
        "embd_pdrop": ABSENT_OR_ZERO,
        "resid_pdrop": ABSENT_OR_ZERO,
        "original_max_position_embeddings": ANY_VALUE,  # used by longrope only
    }
    fused: ClassVar = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

    def read(self, keys: Keys) -> dict[str, Any]:
        fields = read_base(keys, partial=1.0)
        if (scaling := fields["rope"].scaling) != "none":
            keys.fault("rope_scaling", f"rope_type {scaling!r} is not implemented for this family")
        return fields | read_heads(keys) | {"attention": GQA(window=read_window(keys))}

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        partial = {PARTIAL: decoder.rope.partial}
        return write_base(self, decoder) | partial | write_window(decoder)
