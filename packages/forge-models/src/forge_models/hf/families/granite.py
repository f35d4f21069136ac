"""Granite 3 (IBM, 2024): the Llama architecture with factors on embeddings, scores, residual branches and logits."""

from typing import Any, ClassVar

from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.layers import SwiGLU
from forge_models.hf.config import Keys
from forge_models.hf.family import Family, read_base, read_biases, read_heads, write_base, write_biases

FACTORS = {"embedding_multiplier": "embed_multiplier", "residual_multiplier": "residual_multiplier"}
"""Keys of a configuration -> fields of `DecoderConfig` with the same meaning."""
SCORES, LOGITS = "attention_multiplier", "logits_scaling"
"""Keys of the factor on scores, and of the divisor of logits."""


class Granite(Family):
    model_type = "granite"
    architecture = "GraniteForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": None,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        **dict.fromkeys((*FACTORS, SCORES, LOGITS), 1.0),
    }
    scales_inputs = True
    ignores: ClassVar = {"attention_dropout": (None, 0, 0.1)}  # of the training by its authors; it changes no logit

    def read(self, keys: Keys) -> dict[str, Any]:
        fields = read_base(keys) | read_heads(keys) | {"mlp": SwiGLU(bias=keys.boolean("mlp_bias"))}
        factors = {ours: keys.number(theirs) or 1.0 for theirs, ours in FACTORS.items()}
        scale, divisor = keys.number(SCORES) or None, keys.number(LOGITS) or 1.0
        return fields | factors | {"logit_multiplier": 1 / divisor, "attention": GQA(**read_biases(keys), scale=scale)}

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        shape = decoder.shape
        scale = getattr(shape.attention, "scale", None) or shape.head_dim**-0.5
        written = write_base(self, decoder) | write_biases(decoder) | {"mlp_bias": getattr(shape.mlp, "bias", False)}
        written |= {theirs: getattr(decoder, ours) for theirs, ours in FACTORS.items()}
        return written | {SCORES: scale, LOGITS: _inverse(decoder.logit_multiplier)}


def _inverse(factor: float) -> float:
    """Returns the divisor that stands for a factor: the integer if there is one."""
    exact = 1 / factor
    return float(round(exact)) if round(exact) and 1 / round(exact) == factor else exact
