"""Text models of Llama 4 (Meta, 2025): attention in chunks, layers without rotary positions, experts whose inputs are weighted.

The published folders also have an encoder of images, under the `model_type` llama4.
"""

from types import MappingProxyType
from typing import Any, ClassVar

from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig, TopKSigmoidConfig
from forge_models.hf.config import ABSENT_OR_ZERO, ANY_VALUE, Keys, same_value
from forge_models.hf.families.smollm import INTERVAL, LAYERS, read_still, still_fields
from forge_models.hf.family import Family, read_base, read_biases, read_heads, write_base, write_biases
from forge_models.hf.layers import FULL, ExpertNames, global_fields, period_of, read_experts, windows_of, write_experts

CHUNKED = "chunked_attention"
"""Kind of a local layer in `layer_types`."""
CHUNK, TYPES = "attention_chunk_size", "layer_types"
DENSE_WIDTH = "intermediate_size_mlp"
"""Key of the width of feed-forward layers without experts; `intermediate_size` is that of an expert."""
SPARSE, STEP = "moe_layers", "interleave_moe_layer_step"
"""Keys of the layers with experts: their indices, or every n-th layer."""
TUNED, STRENGTH, FLOOR = "attn_temperature_tuning", "attn_scale", "floor_scale"


class Llama4(Family):
    model_type = "llama4_text"
    architecture = "Llama4ForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": False,
        DENSE_WIDTH: 16384,
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
        SPARSE: None,
        STEP: 1,
        "use_qk_norm": True,
        LAYERS: None,
        INTERVAL: 4,
        CHUNK: 8192,
        TUNED: True,
        STRENGTH: 0.1,
        FLOOR: 8192,
    }
    ignores: ClassVar = {  # the reference computes no loss of routers
        "for_llm_compressor": (None, False),
        **dict.fromkeys(("output_router_logits", "router_aux_loss_coef"), ANY_VALUE),
        "router_jitter_noise": ABSENT_OR_ZERO,
    }
    parts: ClassVar = MappingProxyType({**Family.parts, "mlp": "feed_forward"})
    neighbors: ClassVar = True
    experts: ClassVar = ExpertNames(part="feed_forward", router="router", shared="shared_expert", fused=True, turned=True)

    def read(self, keys: Keys) -> dict[str, Any]:
        fields = read_base(keys, theta=500_000.0) | read_heads(keys)
        layers, width = fields["layers"], fields["ffn_dim"]
        fields["ffn_dim"] = keys.integer(DENSE_WIDTH)
        if keys.values.get(LAYERS) == []:  # as if it were absent, in the reference
            keys.values[LAYERS] = None
        still = read_still(keys, layers)
        norm = "unit" if keys.boolean("use_qk_norm") else "none"
        options = still_fields(still, layers) | _local(keys, still, layers) | _temperature(keys) | {"qk_norm": norm}
        fields["attention"] = keys.make(GQA, **read_biases(keys), **options)
        where, experts = _sparse(keys, layers), read_experts(keys, "num_local_experts", "num_experts")
        if where is None:
            return fields
        every, first = where
        sizes = experts | {"ffn_dim": width, "shared": 1, "every": every, "first_dense": first}
        return fields | {"moe": keys.make(MoEConfig, **sizes, weigh_inputs=True, router=TopKSigmoidConfig())}

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        shape, attention, layers = decoder.shape, decoder.shape.attention, range(decoder.layers)
        written = write_base(self, decoder) | write_biases(decoder) | {DENSE_WIDTH: shape.ffn_dim}
        written[LAYERS] = [int(getattr(attention, "rotates_at", lambda _: True)(layer)) for layer in layers]
        written[TYPES] = [FULL if window is None else CHUNKED for window in windows_of(decoder)]
        written[CHUNK] = getattr(attention, "chunk", None) or self.defaults[CHUNK]
        strength = getattr(attention, "temperature", None)
        written |= {"use_qk_norm": getattr(attention, "qk_norm", "") == "unit", TUNED: strength is not None}
        written |= {STRENGTH: strength or self.defaults[STRENGTH]}
        written |= {FLOOR: getattr(attention, "temperature_length", None) or self.defaults[FLOOR]}
        written[SPARSE] = [layer for layer in layers if shape.has_experts(layer)]
        if shape.moe is None:
            return written
        return written | write_experts(shape.moe, "num_local_experts") | {"intermediate_size": shape.moe.ffn_dim}


def _local(keys: Keys, still: tuple[int, ...], layers: int) -> dict[str, Any]:
    """Reads the layers whose attention is in chunks; by default those with rotary positions."""
    size = keys.integer(CHUNK)
    types = keys.values[TYPES] if keys.given(TYPES) else None
    types = [FULL if layer in still else CHUNKED for layer in range(layers)] if types is None else types
    if not isinstance(types, list) or len(types) != layers or any(kind not in (FULL, CHUNKED) for kind in types):
        keys.fault(TYPES, f"expected {layers} times {FULL!r} or {CHUNKED!r}")
        return {}
    return {"chunk": size, **global_fields(types)} if CHUNKED in types else {}


def _temperature(keys: Keys) -> dict[str, Any]:
    """Reads the factor on queries of layers without rotary positions."""
    if same_value(keys.values.get(TUNED), 4):  # transformers 4.51 wrote this for true
        keys.values[TUNED] = True
    tuned, strength, length = keys.boolean(TUNED), keys.not_negative(STRENGTH), keys.integer(FLOOR)
    if not tuned or not strength:
        return {}
    return {"temperature": strength, "temperature_length": length, "temperature_shift": 1, "temperature_layers": "nope"}


def _sparse(keys: Keys, layers: int) -> tuple[int, int] | None:
    """Reads `every` and `first_dense` of the layers with experts; None if there are none."""
    listed, step = keys.get(SPARSE), keys.integer(STEP)
    if listed is None:
        listed = list(range(step - 1, layers, step)) if step else []
    if not isinstance(listed, list) or any(type(layer) is not int or not 0 <= layer < layers for layer in listed):
        keys.fault(SPARSE, f"expected indices of the {layers} layers, not {listed!r}")
        return None
    where = period_of([layer in listed for layer in range(layers)]) if listed else None
    if listed and where is None:
        keys.fault(SPARSE, f"{listed} is not implemented; layers with experts must follow at equal distances")
    return where
