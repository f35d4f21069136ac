"""Gemma-3, text (Gemma Team, 2025): norms of q and k, five local layers to one global, each kind with its own base."""

from dataclasses import replace
from typing import Any, ClassVar

from forge_models.components.decoder import Decoder
from forge_models.hf.base import write_base
from forge_models.hf.config import Keys
from forge_models.hf.families.gemma2 import ACTIVATION, SANDWICH, read_gemma, write_gemma
from forge_models.hf.family import Family

LOCAL = "rope_local_base_freq"
"""Base of the angles of local layers."""


class Gemma3(Family):
    model_type = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "final_logit_softcapping": None,
    }
    ignores: ClassVar = {"attn_logit_softcapping": (None,)}  # the reference reads it and applies no cap: which holds is not clear
    parts: ClassVar = SANDWICH

    def read(self, keys: Keys) -> dict[str, Any]:
        fields = read_gemma(keys, period=6, theta=1_000_000.0, local_theta=10_000.0, local_key=LOCAL)
        return fields | {"attention": replace(fields["attention"], qk_norm="head")}

    def write(self, decoder: Decoder) -> dict[str, Any]:
        local = decoder.rope.local_theta
        written = write_base(self, decoder, activation=ACTIVATION)
        return written | ({} if local is None else {LOCAL: local}) | write_gemma(decoder)
