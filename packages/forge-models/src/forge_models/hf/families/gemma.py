"""Gemma-2 and the text part of Gemma-3 (Gemma Team, 2024 and 2025)."""

from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.layers import GeGLU
from forge_models.hf.config import Keys
from forge_models.hf.family import Family, read_base, read_biases, read_heads, write_base, write_biases
from forge_models.hf.layers import read_period, write_local_layers

SANDWICH = MappingProxyType(
    {
        "attention": "self_attn",
        "mlp": "mlp",
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
)
"""Part of a block -> its name in a layer, for norms before and after each part."""

ACTIVATION = ("hidden_activation", "gelu_pytorch_tanh")
"""Key and value of the activation."""

LOCAL_THETA = "rope_local_base_freq"
"""Key of the base of the angles of local layers."""


class Gemma2(Family):
    """Norms before and after each part, soft caps, every other layer local."""

    model_type = "gemma2"
    architecture = "Gemma2ForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }
    parts: ClassVar = SANDWICH

    def read(self, keys: Keys) -> dict[str, Any]:
        fields = read_gemma(keys, period=2)
        soft_cap = keys.number("attn_logit_softcapping", optional=True) or None
        return fields | {"attention": replace(fields["attention"], soft_cap=soft_cap)}

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        soft_cap = getattr(decoder.shape.attention, "soft_cap", None)
        written = write_base(self, decoder, activation=ACTIVATION)
        return written | write_gemma(decoder) | {"attn_logit_softcapping": soft_cap}


def read_gemma(keys: Keys, period: int, **rope: Any) -> dict[str, Any]:
    """Reads the fields that Gemma-2 and 3 have in common; every `period`-th layer is global, and `rope` are the arguments of
    `read_rope`."""
    fields = read_base(keys, activation=ACTIVATION, **rope)
    if keys.given("hidden_act") and keys.values["hidden_act"] is not None:  # old configurations have it; the reference ignores it
        keys.only("hidden_act", "gelu", ACTIVATION[1])
    fields |= read_heads(keys)
    attention = read_biases(keys) | read_period(keys, period)
    scalar = keys.number("query_pre_attn_scalar")
    scale = None if scalar in (fields["head_dim"], 0) else scalar**-0.5
    return fields | {
        "norm_placement": "sandwich",
        "norm": replace(fields["norm"], offset=1),
        "mlp": GeGLU(),
        "embed_multiplier": fields["dim"] ** 0.5,
        "attention": GQA(**attention, scale=scale),
        "soft_cap": keys.number("final_logit_softcapping", optional=True) or None,
    }


def write_gemma(decoder: DecoderConfig) -> dict[str, Any]:
    """Returns the keys of `read_gemma` other than those of rotary positions."""
    scale = getattr(decoder.shape.attention, "scale", None)
    scalar = decoder.shape.head_dim if scale is None else _inverse_square(scale)
    caps = {"query_pre_attn_scalar": scalar, "final_logit_softcapping": decoder.soft_cap}
    return write_biases(decoder) | write_local_layers(decoder) | caps


def _inverse_square(scale: float) -> float:
    exact = scale**-2
    return round(exact) if round(exact) ** -0.5 == scale else exact


class Gemma3(Family):
    """Norms of q and k, five local layers for each global one, and a separate rotary base for each kind."""

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
    ignores: ClassVar = {"attn_logit_softcapping": (None,)}  # the reference reads it and applies no cap, so a value is ambiguous
    parts: ClassVar = SANDWICH

    def read(self, keys: Keys) -> dict[str, Any]:
        fields = read_gemma(keys, period=6, theta=1_000_000.0, local_theta=10_000.0, local_key=LOCAL_THETA)
        return fields | {"attention": replace(fields["attention"], qk_norm="head")}

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        local = decoder.rope.local_theta
        written = write_base(self, decoder, activation=ACTIVATION)
        return written | ({} if local is None else {LOCAL_THETA: local}) | write_gemma(decoder)
