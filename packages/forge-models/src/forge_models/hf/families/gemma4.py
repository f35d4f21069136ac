"""The text part of Gemma 4 (Gemma Team, 2026): local and global layers differ in the number and width of their heads.

Sparse models have experts beside the feed-forward layer of every block, which is one shared expert here, with norms of their own.

Global layers rotate a quarter of their pairs and may take their values from their keys. Scores have scale 1, because heads of q,
k and v are normalized, and a number of each block multiplies the stream that leaves it.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig, LayerInputsConfig
from forge_models.components.experts import MoEConfig, NormedTopKConfig
from forge_models.components.layers import GeGLU
from forge_models.hf.config import ANY_VALUE, Keys
from forge_models.hf.families.gemma import ACTIVATION, SANDWICH
from forge_models.hf.family import Family, read_base, read_biases, read_heads, write_base, write_biases
from forge_models.hf.layers import FULL, SLIDING, ExpertNames, read_local_layers, read_window, write_local_layers
from forge_models.hf.rope import TABLES, write_tables

PERIOD = 6
"""Without `layer_types`, every sixth layer and the last one are global."""
WIDTH, HEADS = "global_head_dim", "num_global_key_value_heads"
"""Keys of the heads of global layers, as they are published."""
OVERRIDES = "per_layer_config"
"""Key with the heads of each global layer, as transformers saves them."""
FIELDS = {"head_dim": "head_dim", "num_key_value_heads": "kv_heads"}
"""Key of an entry of `per_layer_config` -> field of `DecoderConfig`."""
EQUAL = "attention_k_eq_v"
"""Key that says whether global layers take their values from their keys, and have as many of both as `HEADS` says."""

VECTORS, ROWS = "hidden_size_per_layer_input", "vocab_size_per_layer_input"
"""Keys of the vectors of layers and of their table (`LayerInputsConfig`)."""
SHARED, WIDER = "num_kv_shared_layers", "use_double_wide_mlp"
"""Keys of the last layers without keys and values, and of the width of their feed-forward layers."""
INPUTS = {
    "layer_input.gate": "per_layer_input_gate",
    "layer_input.projection": "per_layer_projection",
    "layer_input.norm": "post_per_layer_input_norm",
}
"""Module of a block -> its name in a layer."""
SPARSE, TOP_K, WIDTH_OF_EXPERTS = "enable_moe_block", "top_k_experts", "moe_intermediate_size"
"""Keys of the experts beside the feed-forward layer of every block."""
OTHERS = MappingProxyType(
    {
        "router.scale": "router.scale",
        "router.expert_scale": "router.per_expert_scale",
        "shared_norm.weight": "pre_feedforward_layernorm.weight",
        "shared_post_norm.weight": "post_feedforward_layernorm_1.weight",
        "experts_norm.weight": "pre_feedforward_layernorm_2.weight",
        "experts_post_norm.weight": "post_feedforward_layernorm_2.weight",
    }
)
"""Name of a parameter of experts -> its name in a layer."""


class Gemma4(Family):
    model_type = "gemma4_text"
    architecture = "Gemma4ForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "sliding_window": 512,
        "final_logit_softcapping": None,
        WIDTH: 512,
        HEADS: None,
        EQUAL: False,
        VECTORS: 256,
        ROWS: 262144,
        SHARED: 0,
        WIDER: False,
        SPARSE: False,
        "num_experts": None,
        TOP_K: None,
        WIDTH_OF_EXPERTS: None,
    }
    ignores: ClassVar = {
        "use_bidirectional_attention": (None, "vision"),  # of images only
        **dict.fromkeys((ROWS, WIDER), ANY_VALUE),  # without `VECTORS` and `SHARED`
        **dict.fromkeys(("num_experts", TOP_K, WIDTH_OF_EXPERTS), ANY_VALUE),  # without `SPARSE`
    }
    parts: ClassVar = {**SANDWICH, **INPUTS, "scalar": "layer_scalar"}
    outside: ClassVar = {
        "layer_inputs.table.weight": "model.embed_tokens_per_layer.weight",
        "layer_inputs.projection.weight": "model.per_layer_model_projection.weight",
        "layer_inputs.norm.weight": "model.per_layer_projection_norm.weight",
    }
    experts: ClassVar = ExpertNames(part="", router="router.proj", shared="mlp", fused=True, others=OTHERS)

    def read(self, keys: Keys) -> dict[str, Any]:
        fields = read_base(keys, activation=ACTIVATION, theta=1e6, local_theta=10_000.0, proportion=0.25) | read_heads(keys)
        types, local = _local(keys)
        heads = _global_heads(keys, types, fields)
        if not local:  # every layer is global
            fields["rope"] = replace(fields["rope"], local_theta=None)
            fields |= {"head_dim": heads.pop("global_head_dim", fields["head_dim"])}
            fields |= {"kv_heads": heads.pop("global_kv_heads", fields["kv_heads"])}
        equal = "none" if not keys.boolean(EQUAL) else "global" if local else "all"
        shared = _shared(keys, types)
        attention = {**read_biases(keys), **local, **heads, **shared, "keys_as_values": equal, "qk_norm": "head", "v_norm": True}
        return fields | {
            "norm_placement": "sandwich",
            "mlp": GeGLU(),
            "embed_multiplier": fields["dim"] ** 0.5,
            "attention": keys.make(GQA, **attention, scale=1.0),
            "moe": _experts(keys, fields) if keys.boolean(SPARSE) else None,
            "soft_cap": keys.number("final_logit_softcapping", optional=True) or None,
            "layer_scalar": True,
            "layer_inputs": _layer_inputs(keys),
        }

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        attention: Any = decoder.shape.attention
        written = write_base(self, decoder, activation=ACTIVATION) | write_biases(decoder) | write_local_layers(decoder)
        for key in ("rope_theta", "rope_scaling"):  # the reference reads neither
            del written[key]
        if written["sliding_window"] is None:  # the reference needs a number
            del written["sliding_window"]
        kv_heads = getattr(attention, "global_kv_heads", None)
        written |= {TABLES: write_tables(decoder.rope), "final_logit_softcapping": decoder.soft_cap}
        written |= {WIDTH: getattr(attention, "global_head_dim", None) or decoder.shape.head_dim, HEADS: kv_heads}
        written[EQUAL] = getattr(attention, "keys_as_values", "none") != "none"
        written |= {SHARED: getattr(attention, "shared_kv_layers", 0), WIDER: getattr(attention, "shared_kv_ffn_factor", 1) == 2}
        inputs = decoder.shape.layer_inputs
        written |= {VECTORS: 0} if inputs is None else {VECTORS: inputs.dim, ROWS: inputs.vocab_size}
        written[SPARSE] = decoder.shape.moe is not None
        if (moe := decoder.shape.moe) is None:
            return written
        sizes = {"num_experts": moe.experts, TOP_K: moe.top_k, WIDTH_OF_EXPERTS: moe.ffn_dim}
        return written | sizes | {"intermediate_size": moe.shared * moe.ffn_dim}

    def skipped(self, decoder: DecoderConfig) -> tuple[str, ...]:
        """See `Family.skipped`: published files have keys and values of layers that take those of others."""
        attention: Any = decoder.shape.attention
        takers = [layer for layer in range(decoder.layers) if attention.takes(layer, decoder.layers)]
        return tuple(f"model.layers.{layer}.self_attn.{name}" for layer in takers for name in ("k_proj.", "v_proj.", "k_norm."))


def _shared(keys: Keys, types: list[str]) -> dict[str, Any]:
    """Reads the last layers without keys and values, and the factor on the width of their feed-forward layers."""
    shared = keys.whole(SHARED)
    own = types[: max(0, len(types) - shared)]
    if any(kind not in own for kind in types):
        keys.fault(SHARED, f"{shared} leaves no layer of some kind with keys and values of its own")
        shared = 0
    wider = keys.boolean(WIDER) if shared else False
    if wider and keys.values.get(SPARSE) is True:
        keys.fault(WIDER, f"is not implemented with {SPARSE}")
    return {"shared_kv_layers": shared, "shared_kv_ffn_factor": 2 if wider else 1}


def _layer_inputs(keys: Keys) -> LayerInputsConfig | None:
    """Reads the width of the vectors of layers, and the number of rows of their table."""
    width = keys.whole(VECTORS)
    if not width:
        return None
    rows = keys.integer(ROWS)
    if rows and rows < keys.integer("vocab_size"):
        keys.fault(ROWS, f"{rows} is less than vocab_size {keys.integer('vocab_size')}, which is not implemented")
    return keys.make(LayerInputsConfig, dim=width, vocab_size=rows)


def _experts(keys: Keys, fields: Mapping[str, Any]) -> MoEConfig | None:
    """Reads the experts beside the feed-forward layer of every block, which is that of shared experts as wide as it."""
    width, whole = keys.integer(WIDTH_OF_EXPERTS), fields["ffn_dim"]
    if width and whole % width:
        keys.fault("intermediate_size", f"{whole} is not a multiple of {WIDTH_OF_EXPERTS} {width}, which is not implemented")
    return keys.make(
        MoEConfig,
        experts=keys.integer("num_experts"),
        top_k=keys.integer(TOP_K),
        ffn_dim=width,
        shared=whole // width if width else 1,
        branch_norms=True,
        router=NormedTopKConfig(eps=fields["norm"].eps),
    )


def _local(keys: Keys) -> tuple[list[str], dict[str, Any]]:
    """Reads the kind of every layer, and the fields of `GQA` for its local layers; empty if there are none."""
    layers = keys.integer("num_hidden_layers")
    types = [SLIDING if (layer + 1) % PERIOD and layer + 1 < layers else FULL for layer in range(layers)]
    local = read_local_layers(keys, read_window(keys), lambda layer: types[layer] == SLIDING)
    given = keys.values.get("layer_types")
    if isinstance(given, list) and given:
        types = given
        if types[-1] != FULL:
            keys.fault("layer_types", f"the last layer must be {FULL!r}, which the reference makes of it without saying so")
    tables: Any = keys.values.get(TABLES)
    if isinstance(tables, dict):
        for kind in [kind for kind in (FULL, SLIDING) if kind in types]:
            table = tables.get(kind)
            if not isinstance(table, dict) or table.get("rope_theta") is None:
                keys.fault(f"{TABLES}.{kind}", "is missing, or has no rope_theta")
    for key in ("rope_theta", "rope_scaling"):  # the reference does not read them
        if keys.given(key):
            keys.only(key, None)
    return types, local


def _global_heads(keys: Keys, types: list[str], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Reads `global_head_dim` and `global_kv_heads`, which are left out if they are those of all layers."""
    if keys.given(OVERRIDES):
        found = _overridden(keys, keys.values[OVERRIDES], types, fields)
        for key, field in {WIDTH: "head_dim", HEADS: "kv_heads"}.items():
            if keys.given(key) and keys.values[key] is not None:
                keys.only(key, found[field])
    else:
        heads = keys.integer(HEADS, optional=True)
        found = {"head_dim": keys.integer(WIDTH), "kv_heads": heads if heads and keys.boolean(EQUAL) else fields["kv_heads"]}
    return {f"global_{field}": value for field, value in found.items() if value and value != fields[field]}


def _overridden(keys: Keys, table: Any, types: list[str], fields: Mapping[str, Any]) -> dict[str, int]:
    """Reads the heads of global layers from a table of layers, which must be the same for all of them."""
    plain = {field: fields[field] for field in FIELDS.values()}
    made: list[dict[str, int]] = [dict(plain) for _ in types]
    for name, entry in ({} if table is None else table if isinstance(table, dict) else {"": table}).items():
        layer = int(name) if str(name).isdecimal() else -1
        if not 0 <= layer < len(types) or not isinstance(entry, dict) or set(entry) - set(FIELDS):
            keys.fault(OVERRIDES, f"expected a table of layers 0 to {len(types) - 1} with {' and '.join(FIELDS)}")
            return plain
        for key, value in entry.items():
            if type(value) is not int or value <= 0:
                keys.fault(OVERRIDES, f"expected a positive integer as {name}.{key}, not {value!r}")
                return plain
            made[layer][FIELDS[key]] = value
    chosen = [heads for heads, kind in zip(made, types, strict=True) if kind == FULL] or [plain]
    others = [heads for heads, kind in zip(made, types, strict=True) if kind != FULL]
    if any(heads != chosen[0] for heads in chosen) or any(heads != plain for heads in others):
        keys.fault(OVERRIDES, "is implemented if all global layers have equal heads and no other layer is listed")
    return chosen[0]
