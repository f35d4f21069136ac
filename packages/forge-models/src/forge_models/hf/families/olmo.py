"""OLMo, OLMo-2, OLMo-3, OLMoE and OLMo Hybrid."""

from typing import Any, ClassVar

from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig, SoftmaxTopKConfig
from forge_models.components.layers import LayerNormConfig
from forge_models.components.recurrent import GDN, Hybrid
from forge_models.hf.config import ANY_VALUE, Keys
from forge_models.hf.family import Family, read_base, read_biases, read_heads, write_base, write_biases
from forge_models.hf.layers import (
    FULL,
    ExpertNames,
    normalized,
    read_experts,
    read_losses,
    read_period,
    write_experts,
    write_local_layers,
    write_losses,
)
from forge_models.hf.recurrent import LINEAR, SIZES, read_kinds, separate_places, write_kinds
from forge_models.shape import Rope


class Olmo(Family):
    """Layer norms without parameters (Groeneveld et al., 2024); their `eps` is fixed."""

    model_type = "olmo"
    architecture = "OlmoForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": None,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }
    ignores: ClassVar = {"clip_qkv": (None,)}

    def read(self, keys: Keys) -> dict[str, Any]:
        norm = LayerNormConfig(eps=1e-5, weight=False, bias=False)
        return read_base(keys, eps=None) | read_heads(keys) | {"norm": norm, "attention": GQA(**read_biases(keys))}

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        return write_base(self, decoder, eps=None) | write_biases(decoder)


class Olmo2(Family):
    """Norms after each part of a block, and norms of the full q and k (OLMo et al., 2024)."""

    model_type = "olmo2"
    architecture = "Olmo2ForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": None,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }
    parts: ClassVar = {
        "attention": "self_attn",
        "mlp": "mlp",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }

    def read(self, keys: Keys) -> dict[str, Any]:
        fields = read_base(keys) | read_heads(keys)
        return fields | {"norm_placement": "post", "attention": GQA(**read_biases(keys), qk_norm="full")}

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        return write_base(self, decoder) | write_biases(decoder)


class Olmo3(Family):
    """OLMo-2 with three local layers for each global one; only angles of global layers are scaled (OLMo et al., 2025)."""

    model_type = "olmo3"
    architecture = "Olmo3ForCausalLM"
    defaults: ClassVar = {**Olmo2.defaults, "sliding_window": 4096}
    parts: ClassVar = Olmo2.parts

    def read(self, keys: Keys) -> dict[str, Any]:
        fields = read_base(keys, theta=500_000.0, local_theta=500_000.0) | read_heads(keys)
        attention = GQA(**read_biases(keys), qk_norm="full", **read_period(keys, 4))
        return fields | {"norm_placement": "post", "attention": attention}

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        return write_base(self, decoder) | write_biases(decoder) | write_local_layers(decoder)


class Olmoe(Family):
    """Fine-grained experts in every layer, none shared, and norms of the full q and k (Muennighoff et al., 2024)."""

    model_type = "olmoe"
    architecture = "OlmoeForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": None,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.01,
    }
    ignores: ClassVar = {"clip_qkv": (None,)}
    experts: ClassVar = ExpertNames()

    def read(self, keys: Keys) -> dict[str, Any]:
        fields = read_base(keys) | read_heads(keys)
        fields["attention"] = GQA(**read_biases(keys), qk_norm="full")
        experts = read_experts(keys, "num_experts", "num_local_experts")
        router = SoftmaxTopKConfig(normalize=keys.boolean("norm_topk_prob"))
        return fields | {"moe": keys.make(MoEConfig, **experts, router=router, losses=read_losses(keys))}

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        written = write_base(self, decoder) | write_biases(decoder)
        if (moe := decoder.shape.moe) is None:
            return written
        written |= write_experts(moe, "num_experts") | write_losses(moe)
        return written | {"intermediate_size": moe.ffn_dim, "norm_topk_prob": normalized(moe)}


NEGATIVE = "linear_allow_neg_eigval"
"""Key that says whether the step size of the delta rule is in (0, 2)."""
GATED_EPS = 1e-5
"""`eps` of the norm of each recurrent head: fixed in the reference, independent of `rms_norm_eps`."""


class OlmoHybrid(Family):
    """Gated DeltaNet in three of four layers, with norms before each part; attention as in OLMo-2, with norms after each part.

    The published models have no rotary positions.
    """

    model_type = "olmo_hybrid"
    architecture = "OlmoHybridForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": None,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 65536,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        **dict.fromkeys(SIZES),
        "linear_conv_kernel_dim": 4,
        NEGATIVE: True,
    }
    ignores: ClassVar = dict.fromkeys(  # of the initialization by its authors
        ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"), ANY_VALUE
    )
    parts: ClassVar = {**Olmo2.parts, "attention_norm": "attention_layer_norm", "mlp_norm": "feedforward_layer_norm"}
    recurrent: ClassVar = "linear_attn"
    recurrent_places: ClassVar = staticmethod(separate_places)

    def spelled(self, decoder: DecoderConfig, name: str) -> str:
        """transformers has other names of norms in memory, and saves those of a layer of one kind like those of the other."""
        layer, attention = name.removeprefix(f"{self.layers}.").partition(".")[0], decoder.shape.attention
        if not (layer.isdecimal() and isinstance(attention, Hybrid)):
            return name
        if attention.is_full(int(layer)):
            return name.replace(".feedforward_layer_norm.", ".post_attention_layernorm.")
        name = name.replace(".input_layernorm.", ".attention_layer_norm.")
        return name.replace(".post_attention_layernorm.", ".feedforward_layer_norm.")

    def read(self, keys: Keys) -> dict[str, Any]:
        still = _has_no_theta(keys)
        fields: dict[str, Any] = read_base(keys) | read_heads(keys) | {"norm_placement": "post"}
        fields |= {"rope": Rope()} if still else {}
        layers = keys.integer("num_hidden_layers")
        if not keys.values.get("layer_types"):
            full = range(3, layers, 4) or [layers - 1]
            keys.values["layer_types"] = [FULL if layer in full else LINEAR for layer in range(layers)]
        kinds = read_kinds(keys, 4, interval=False)
        types = keys.values["layer_types"]
        if isinstance(types, list) and len(set(map(str, types))) < 2:
            keys.fault("layer_types", f"expected {FULL!r} at least once and {LINEAR!r} at least once")
        full = GQA(**read_biases(keys), qk_norm="full", nope_every=1 if still else None)
        recurrent = _read_recurrent(keys, fields["heads"], fields["dim"])
        attention = keys.make(Hybrid, **kinds, full=full, recurrent=recurrent, recurrent_norm_placement="pre")
        return fields | {"attention": attention}

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        attention = decoder.shape.attention
        full, recurrent = getattr(attention, "full", None), getattr(attention, "recurrent", None)
        written = write_base(self, decoder) | write_kinds(decoder)
        if getattr(full, "nope_every", None) == 1:
            written["rope_theta"] = None
        written[NEGATIVE] = getattr(recurrent, "negative_eigenvalues", False)
        return written | {"attention_bias": getattr(full, "output_bias", False)}


def _has_no_theta(keys: Keys) -> bool:
    """Whether the base of the angles is null, which means that no layer has rotary positions."""
    tables = [keys.values[key] for key in ("rope_parameters", "rope_scaling") if keys.values.get(key)]
    if not tables and "rope_theta" not in keys.values and keys.values.get("rope_parameters", "absent") is None:
        keys.fault(
            "rope_parameters",
            'null means no rotary positions to its authors, but a base of 10000 to transformers; write {"rope_type": "default", '
            '"rope_theta": null} for none, or remove the key',
        )
    places = [*(table for table in tables if isinstance(table, dict)), keys.values]
    return next((place["rope_theta"] is None for place in places if "rope_theta" in place), False)


def _read_recurrent(keys: Keys, heads: int, dim: int) -> GDN:
    """Reads the recurrent layers, whose sizes follow those of the model if they are absent."""
    found = {ours: keys.integer(theirs, optional=True) for theirs, ours in SIZES.items()}
    key_heads = found["key_heads"] or heads
    key_dim = found["key_dim"] or (int(0.75 * dim / key_heads) if key_heads else 0)
    sizes = {"key_heads": key_heads, "value_heads": found["value_heads"] or heads, "key_dim": key_dim}
    sizes |= {"value_dim": found["value_dim"] or 2 * key_dim, "conv_width": found["conv_width"]}
    known: dict[str, Any] = {name: size or 1 for name, size in sizes.items()}  # 0 after a fault
    return GDN(**known, negative_eigenvalues=keys.boolean(NEGATIVE), norm_eps=GATED_EPS)
