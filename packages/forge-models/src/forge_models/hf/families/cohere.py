"""Command R and R+ (Cohere, 2024), and Command R7B with local layers: one norm before attention and feed-forward layer."""

from typing import Any, ClassVar

from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.layers import LayerNormConfig
from forge_models.hf.config import ANY_VALUE, Keys, Same
from forge_models.hf.family import Family, read_base, read_biases, read_heads, write_base, write_biases
from forge_models.hf.layers import read_period, write_local_layers

EPS, SCALE = "layer_norm_eps", "logit_scale"


class Cohere(Family):
    """Layer norms without biases, parallel parts, neighboring rotary dimensions, and a factor on the logits."""

    model_type = "cohere"
    architecture = "CohereForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": None,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "initializer_range": 0.02,
        EPS: 1e-5,
        "tie_word_embeddings": True,
        "attention_bias": False,
        SCALE: 0.0625,
    }
    ignores: ClassVar = {"use_qk_norm": (None, False)}
    parts: ClassVar = {"attention": "self_attn", "mlp": "mlp", "attention_norm": "input_layernorm"}
    neighbors: ClassVar = True

    def read(self, keys: Keys) -> dict[str, Any]:
        return _read(keys, theta=500_000.0) | {"attention": GQA(**read_biases(keys))}

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        return _write(self, decoder)


class Cohere2(Family):
    """A window and rotary positions in three of four layers, neither in the others."""

    model_type = "cohere2"
    architecture = "Cohere2ForCausalLM"
    defaults: ClassVar = {name: value for name, value in Cohere.defaults.items() if name != "head_dim"} | {"sliding_window": 4096}
    ignores: ClassVar = {
        **Cohere.ignores,
        "layer_switch": ANY_VALUE,  # the reference has the pattern under another name
        "order_of_interleaved_layers": (None, "local_attn_first"),
        "position_embedding_type": (None, "rope_gptj"),
        "rotary_pct": (None, 1),
        "use_embedding_sharing": (None, Same("tie_word_embeddings")),
        "use_gated_activation": (None, True),
        "use_parallel_block": (None, True),
        "use_parallel_embedding": (None, False),
    }
    parts: ClassVar = Cohere.parts
    neighbors: ClassVar = True

    def read(self, keys: Keys) -> dict[str, Any]:
        fields = _read(keys)
        if keys.given("head_dim"):  # the reference computes it
            keys.only("head_dim", None, fields["head_dim"])
        local: dict[str, Any] = read_period(keys, 4)
        still: dict[str, Any] = {
            "nope_" + name.removeprefix("global_"): value for name, value in local.items() if name != "window"
        }
        still = still if local else {"nope_every": 1}
        return fields | {"attention": GQA(**read_biases(keys), **local, **still)}

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        written = _write(self, decoder) | write_local_layers(decoder)
        # The reference makes a mask of a window even if no layer has one.
        return written | {"sliding_window": written["sliding_window"] or self.defaults["sliding_window"]}


def _read(keys: Keys, **rope: Any) -> dict[str, Any]:
    fields = read_base(keys, eps=EPS, **rope) | read_heads(keys) | {"norm": LayerNormConfig(eps=keys.number(EPS), bias=False)}
    return fields | {"parallel_residual": True, "shared_norm": True, "logit_multiplier": keys.number(SCALE)}


def _write(family: Family, decoder: DecoderConfig) -> dict[str, Any]:
    return write_base(family, decoder, eps=EPS) | write_biases(decoder) | {SCALE: decoder.logit_multiplier}
