"""SmolLM3 (Hugging Face, 2025): the Llama architecture, where every fourth layer has no rotary positions (Yang et al., 2025)."""

from typing import Any, ClassVar

from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.layers import SwiGLU
from forge_models.hf.config import ANY_VALUE, Keys
from forge_models.hf.family import Family, read_base, read_biases, read_heads, write_base, write_biases
from forge_models.hf.layers import read_local_layers, read_window, write_local_layers

LAYERS, INTERVAL = "no_rope_layers", "no_rope_layer_interval"
"""Keys of the layers without rotary positions: 0 or 1 for each layer, where 0 is one without; or every n-th layer."""


class SmolLM3(Family):
    """A window, if one is used, is in the layers without rotary positions."""

    model_type = "smollm3"
    architecture = "SmolLM3ForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": 4,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        LAYERS: None,
        INTERVAL: 4,
    }
    ignores: ClassVar = {"max_window_layers": ANY_VALUE, "pretraining_tp": ANY_VALUE}  # the reference ignores them

    def read(self, keys: Keys) -> dict[str, Any]:
        fields = read_base(keys, theta=2_000_000.0) | read_heads(keys) | {"mlp": SwiGLU(bias=keys.boolean("mlp_bias"))}
        layers = keys.integer("num_hidden_layers")
        still = read_still(keys, layers)
        window, used = read_window(keys), keys.boolean("use_sliding_window")
        local = read_local_layers(keys, window, lambda layer: used and window is not None and layer in still)
        return fields | {"attention": GQA(**read_biases(keys), **local, **still_fields(still, layers))}

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        shape, local = decoder.shape, write_local_layers(decoder)
        rotates = getattr(shape.attention, "rotates_at", lambda _: True)
        written = write_base(self, decoder) | write_biases(decoder) | {"mlp_bias": getattr(shape.mlp, "bias", False)} | local
        written["use_sliding_window"] = written["sliding_window"] is not None
        return written | {LAYERS: [int(rotates(layer)) for layer in range(decoder.layers)]}


def read_still(keys: Keys, layers: int) -> tuple[int, ...]:
    """Reads the layers without rotary positions."""
    listed, every = keys.get(LAYERS), keys.integer(INTERVAL)
    if listed is None:
        return tuple(layer for layer in range(layers) if every and (layer + 1) % every == 0)
    if not isinstance(listed, list) or len(listed) < layers or any(each not in (0, 1) for each in listed):
        keys.fault(LAYERS, f"expected 0 or 1 for each of {layers} layers, not {listed!r}")
        return ()
    return tuple(layer for layer in range(layers) if not listed[layer])


def still_fields(still: tuple[int, ...], layers: int) -> dict[str, Any]:
    """Returns the fields of the attention: a period if the layers have one."""
    if not still:
        return {}
    every = still[0] + 1
    return {"nope_every": every} if still == tuple(range(every - 1, layers, every)) else {"nope_layers": still}
