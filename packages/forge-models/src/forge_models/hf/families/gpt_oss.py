"""gpt-oss (OpenAI, 2025): sinks of attention, a window in every other layer, experts with biases and clamped gates.

Weights in MXFP4 are read as bf16 (`forge_models.hf.mxfp4`), and never written.
"""

from types import MappingProxyType
from typing import Any, ClassVar

from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig, SoftmaxTopKConfig
from forge_models.components.layers import ClampedSwiGLU
from forge_models.hf.config import ANY_VALUE, Keys, Same
from forge_models.hf.family import Family, read_base, read_biases, read_heads, write_base, write_biases
from forge_models.hf.layers import (
    TOP_K,
    ExpertNames,
    read_experts,
    read_local_layers,
    read_losses,
    read_window,
    write_experts,
    write_local_layers,
    write_losses,
)
from forge_models.hf.mxfp4 import read_quantization

LIMIT, SLOPE = "swiglu_limit", "swiglu_alpha"
"""Keys of the limit of clamped values, and of the factor inside the sigmoid."""

SCALING = MappingProxyType(
    {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    | {"original_max_position_embeddings": 4096}
)
"""Scaling of angles if a configuration has no table of them, as in the reference."""


class GptOss(Family):
    model_type = "gpt_oss"
    architecture = "GptOssForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "head_dim": 64,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "sliding_window": 128,
        "num_local_experts": 128,
        TOP_K: 4,
        LIMIT: 7.0,
        SLOPE: 1.702,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }
    ignores: ClassVar = {
        "experts_per_token": (Same(TOP_K),),
        "initial_context_length": ANY_VALUE,  # used by other programs; the scaling has its own length
    }
    experts: ClassVar = ExpertNames(router="router", bias="router.bias", interleaved=True)

    def read(self, keys: Keys) -> dict[str, Any]:
        if not any(keys.values.get(table) for table in ("rope_scaling", "rope_parameters")):
            keys.values["rope_scaling"] = dict(SCALING)
        read_quantization(keys)
        fields = read_base(keys, theta=150_000.0) | read_heads(keys)
        local = read_local_layers(keys, read_window(keys), lambda layer: layer % 2 == 0)
        fields["mlp"] = keys.make(ClampedSwiGLU, limit=keys.number(LIMIT), slope=keys.number(SLOPE), bias=True)
        fields["attention"] = GQA(**read_biases(keys), **local, sinks=True)
        experts = read_experts(keys, "num_local_experts", "num_experts")
        router = SoftmaxTopKConfig(bias=True)
        return fields | {"moe": keys.make(MoEConfig, **experts, router=router, losses=read_losses(keys))}

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        mlp: Any = decoder.shape.mlp
        written = write_base(self, decoder) | write_biases(decoder) | write_local_layers(decoder)
        written |= {LIMIT: getattr(mlp, "limit", 7.0), SLOPE: getattr(mlp, "slope", 1.702)}
        if (moe := decoder.shape.moe) is None:
            return written
        return written | write_experts(moe, "num_local_experts") | write_losses(moe) | {"intermediate_size": moe.ffn_dim}
