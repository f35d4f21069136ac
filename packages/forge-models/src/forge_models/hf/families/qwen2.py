"""Qwen2 and 2.5 (Yang et al., 2024): biases of q, k and v; a window in the upper layers when switched on."""

from typing import Any, ClassVar

from forge_models.components.attentions import GQA
from forge_models.components.decoder import Decoder
from forge_models.hf.base import read_base, read_heads, write_base
from forge_models.hf.config import Keys
from forge_models.hf.family import Family
from forge_models.hf.windows import SLIDING, read_local_layers, read_window, write_local_layers


class Qwen2(Family):
    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": 32,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }

    def read(self, keys: Keys) -> dict[str, Any]:
        fields = read_base(keys) | read_heads(keys)
        return fields | {"attention": GQA(qkv_bias=True, **read_upper_windows(keys))}

    def write(self, decoder: Decoder) -> dict[str, Any]:
        return write_base(self, decoder) | write_upper_windows(decoder)


def read_upper_windows(keys: Keys) -> dict[str, Any]:
    """Fields of the attention: the window counts when it is switched on, from a layer onwards."""
    window, used, first = read_window(keys), keys.boolean("use_sliding_window"), keys.whole("max_window_layers")
    window = window if used else None
    return read_local_layers(keys, window, lambda layer: window is not None and layer >= first)


def write_upper_windows(decoder: Decoder) -> dict[str, Any]:
    """The keys of `read_upper_windows`."""
    written = write_local_layers(decoder)
    local = [layer for layer, kind in enumerate(written["layer_types"]) if kind == SLIDING]
    return written | {"use_sliding_window": bool(local), "max_window_layers": local[0] if local else decoder.layers}
