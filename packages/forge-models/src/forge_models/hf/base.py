"""What most families say with the same keys: sizes, norm, angles, heads, biases of attention. A family adds what is its own.

A function that reads leaves faults in `keys` and goes on, so that all of them are reported together.
"""

from collections.abc import Mapping
from typing import Any

from forge_models.components.decoder import Decoder
from forge_models.components.mlps import SwiGLU
from forge_models.components.norms import RMSNorm
from forge_models.hf.config import Keys
from forge_models.hf.family import Family
from forge_models.hf.rope import read_rope, write_rope

SIZES: Mapping[str, str] = {
    "hidden_size": "dim",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "ffn_dim",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_length",
}
"""Key of a configuration -> field of `Decoder`, for plain numbers that every family has."""

SILU = ("hidden_act", "silu")
"""Key and value of the usual activation."""


def read_base(keys: Keys, eps: str = "rms_norm_eps", activation: tuple[str, str] = SILU, **rope: Any) -> dict[str, Any]:
    """The fields of `Decoder` that every family says; `eps` and `activation` are keys that differ in few, `rope` is that of
    `read_rope`."""
    sizes = {ours: keys.integer(theirs) for theirs, ours in SIZES.items()}
    norm, std = RMSNorm(eps=keys.number(eps)), keys.number("initializer_range")
    tied = keys.boolean("tie_word_embeddings")
    keys.only(*activation)
    return sizes | {"norm": norm, "init_std": std, "tied_embeddings": tied, "mlp": SwiGLU()} | read_rope(keys, **rope)


def read_heads(keys: Keys) -> dict[str, Any]:
    """`kv_heads` and `head_dim`."""
    dim, heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    kv_heads = keys.integer("num_key_value_heads", optional=True) or heads
    head_dim = keys.integer("head_dim", optional=True) if keys.known("head_dim") else 0
    return {"kv_heads": kv_heads, "head_dim": head_dim or (dim // heads if heads else 0)}


def read_biases(keys: Keys) -> dict[str, Any]:
    """Biases of all four projections of the attention, which one key says."""
    bias = keys.boolean("attention_bias")
    return {"qkv_bias": bias, "output_bias": bias}


def write_base(family: Family, decoder: Decoder, eps: str = "rms_norm_eps", activation: tuple[str, str] = SILU) -> dict[str, Any]:
    """The keys of `read_base` and `read_heads`, and what has one value for every model."""
    shape = decoder.shape
    written: dict[str, Any] = {"attention_dropout": 0.0, "use_cache": True, "initializer_range": shape.init_std}
    written |= {theirs: getattr(shape, ours) for theirs, ours in SIZES.items()} | {"num_key_value_heads": shape.kv_heads}
    if "head_dim" in family.defaults:
        written["head_dim"] = shape.head_dim
    written |= {eps: getattr(shape.norm, "eps", 0.0), "tie_word_embeddings": shape.tied_embeddings}
    return written | dict([activation]) | write_rope(decoder)


def write_biases(decoder: Decoder) -> dict[str, Any]:
    """The key of `read_biases`."""
    return {"attention_bias": getattr(decoder.shape.attention, "output_bias", False)}
