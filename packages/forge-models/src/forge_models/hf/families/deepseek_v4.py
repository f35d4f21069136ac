"""DeepSeek-V4 (2026): attention to a window and to compressed keys, residual streams, and experts in every layer.

Forge writes the published names of tensors. Those of transformers, of a model in memory and of its saved folders, are read as
well. MTP modules, "mtp.0." and so on, do not affect logits and are not read.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from forge_models.components.compressed import CompressedMQA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig, SigmoidTopKConfig
from forge_models.components.layers import ClampedSwiGLU, RMSNormConfig
from forge_models.hf.config import ANY_VALUE, Keys
from forge_models.hf.family import SILU, SIZES, Family
from forge_models.hf.layers import AUXILIARY, SWITCH, ExpertNames, read_experts, write_experts
from forge_models.hf.rope import PARTIAL, TABLES, read_table, scaling_of
from forge_models.shape import Rope, Streams

TYPES: Mapping[str, str] = MappingProxyType(
    {"window": "sliding_attention", "sparse": "compressed_sparse_attention", "heavy": "heavily_compressed_attention"}
)
"""Kind of a layer -> its name in `layer_types`."""
RATIOS: Mapping[int, str] = MappingProxyType({0: "window", 4: "sparse", 128: "heavy"})
"""Entry of `compress_ratios`, whatever the rates are -> kind of the layer."""
SCORES: Mapping[str, str] = MappingProxyType({"sqrtsoftplus": "sqrt_softplus", "sigmoid": "sigmoid"})
FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "sliding_window": "window",
        "q_lora_rank": "q_lora_rank",
        "o_groups": "o_groups",
        "o_lora_rank": "o_lora_rank",
        "index_n_heads": "index_heads",
        "index_head_dim": "index_dim",
        "index_topk": "top_k",
    }
)
"""Key -> field of `CompressedMQA`."""
MTP_LAYERS, ROTATED, RATES, LAYER_TYPES, MLP_TYPES = (
    *("num_nextn_predict_layers", "qk_rope_head_dim", "compress_rates", "layer_types"),
    "mlp_layer_types",
)
MOE, HASH = "moe", "hash_moe"
"""Kinds of layers in `mlp_layer_types`."""

ATTENTION = {
    "q_a_proj.weight": ("wq_a.weight", "q_a_proj.weight"),
    "q_a_norm.weight": ("q_norm.weight", "q_a_norm.weight"),
    "q_b_proj.weight": ("wq_b.weight", "q_b_proj.weight"),
    "kv_proj.weight": ("wkv.weight", "kv_proj.weight"),
    "kv_norm.weight": ("kv_norm.weight", "kv_norm.weight"),
    "o_a_proj.groups": ("wo_a.weight", "o_a_proj.weight"),
    "o_b_proj.weight": ("wo_b.weight", "o_b_proj.weight"),
    "sinks": ("attn_sink", "sinks"),
    "indexer.q_proj.weight": ("indexer.wq_b.weight", "compressor.indexer.q_b_proj.weight"),
    "indexer.weights_proj.weight": ("indexer.weights_proj.weight", "compressor.indexer.scorer.weights_proj.weight"),
}
"""Forge's name of a parameter of attention -> its published name, and that in transformers."""
for _ours, _theirs in {"compressor": "compressor", "indexer.compressor": "compressor.indexer"}.items():
    ATTENTION |= {
        f"{_ours}.kv_proj.weight": (f"{_ours}.wkv.weight", f"{_theirs}.kv_proj.weight"),
        f"{_ours}.gate_proj.weight": (f"{_ours}.wgate.weight", f"{_theirs}.gate_proj.weight"),
        f"{_ours}.position_bias": (f"{_ours}.ape", f"{_theirs}.position_bias"),
        f"{_ours}.kv_norm.weight": (f"{_ours}.norm.weight", f"{_theirs}.kv_norm.weight"),
    }
STREAMS = {"weight": "fn", "bias": "base", "scale": "scale"}
"""Parameter of a part that mixes residual streams -> the end of its name."""
MATRICES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
"""Matrix of a feed-forward layer -> its published name."""
OUTSIDE = {"embed.weight": "embed.weight", "norm.weight": "norm.weight", "head.weight": "head.weight"}
OUTSIDE |= {f"merge.{ours}": f"hc_head_{end}" for ours, end in STREAMS.items()}

SPELLED = {
    "model.embed_tokens.weight": "embed.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
    **{f"model.hc_head.hc_{end}": f"hc_head_{end}" for end in STREAMS.values()},
}
"""Name in transformers -> published name, outside of layers."""
IN_LAYER = {
    **{f"self_attn.{theirs}": f"attn.{published}" for published, theirs in ATTENTION.values()},
    "attn.norm.weight": "attn.kv_norm.weight",  # as transformers saves it
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate.weight": "ffn.gate.weight",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    "mlp.gate.tid2eid": "ffn.gate.tid2eid",
    "mlp.experts.gate_up_proj": "ffn.experts.gate_up_proj",
    "mlp.experts.down_proj": "ffn.experts.down_proj",
    **{f"mlp.shared_experts.{ours}.weight": f"ffn.shared_experts.{theirs}.weight" for ours, theirs in MATRICES.items()},
    **{f"{part}_hc.{end}": f"hc_{part}_{end}" for part in ("attn", "ffn") for end in STREAMS.values()},
}
"""Name in a layer in transformers -> published name."""
OF_LAYER = re.compile(r"(?:model\.)?(layers\.\d+\.)(.+)")


class DeepseekV4(Family):
    model_type = "deepseek_v4"
    architecture = "DeepseekV4ForCausalLM"
    defaults: ClassVar = {
        "vocab_size": 129280,
        "hidden_size": 4096,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "q_lora_rank": 1024,
        "num_experts_per_tok": 6,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "max_position_embeddings": 1048576,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "swiglu_limit": 10.0,
        "sliding_window": 128,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        MTP_LAYERS: 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        SWITCH: False,
    }
    ignores: ClassVar = {
        AUXILIARY: ANY_VALUE,
        "router_jitter_noise": ANY_VALUE,  # the reference does not use it
        "mlp_bias": (None, False),
        "expert_dtype": (None, "bf16", "bfloat16"),
        "topk_method": (None, "noaux_tc"),
    }
    parts: ClassVar = {"attention": "attn", "mlp": "ffn", "attention_norm": "attn_norm", "mlp_norm": "ffn_norm"}
    outside: ClassVar = OUTSIDE
    layers: ClassVar = "layers"
    experts: ClassVar = ExpertNames(part="ffn", matrices=MATRICES, bias="gate.bias", table="gate.tid2eid", fused_part="ffn")
    mtp_modules: ClassVar = ("mtp.",)

    def spelled(self, decoder: DecoderConfig, name: str) -> str:
        """Returns the published name of a tensor that has a name of transformers."""
        del decoder
        found = OF_LAYER.fullmatch(name)
        return SPELLED.get(name, name) if found is None else found[1] + IN_LAYER.get(found[2], found[2])

    def place(self, decoder: DecoderConfig, name: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
        """Returns the published name and shape of a parameter of attention, of what mixes streams, and of shared experts."""
        _, layer, part, rest = (*name.split(".", 3), "", "", "")[:4]
        if part in ("attention_streams", "mlp_streams"):
            return f"layers.{layer}.hc_{'attn' if part == 'attention_streams' else 'ffn'}_{STREAMS[rest]}", shape
        if part == "mlp" and rest.startswith("shared."):
            matrix = rest.removeprefix("shared.").removesuffix(".weight")
            return f"layers.{layer}.ffn.shared_experts.{MATRICES[matrix]}.weight", shape
        if part != "attention":
            return None
        rates = {"sparse": decoder.shape.attention.sparse_rate, "heavy": decoder.shape.attention.heavy_rate}  # type: ignore[attr-defined]
        if rest.endswith("position_bias"):
            rate = rates[decoder.shape.attention.kind_at(int(layer), decoder.layers)]  # type: ignore[attr-defined]
            shape = (rate, shape[0] // rate)
        return f"layers.{layer}.attn.{ATTENTION[rest][0]}", shape

    def module(self, name: str) -> str:
        """Returns the name in transformers of a module with a published name."""
        found = OF_LAYER.fullmatch(name)
        outside = {published.removesuffix(".weight"): theirs.removesuffix(".weight") for theirs, published in SPELLED.items()}
        if found is None:
            return outside.get(name, name)
        back = {published.removesuffix(".weight"): theirs.removesuffix(".weight") for theirs, published in IN_LAYER.items()}
        return f"model.{found[1]}{back.get(found[2], found[2])}"

    def read(self, keys: Keys) -> dict[str, Any]:
        fields: dict[str, Any] = {ours: keys.integer(theirs) for theirs, ours in SIZES.items() if theirs != "intermediate_size"}
        width, dim = keys.integer("moe_intermediate_size"), keys.integer("head_dim")
        if keys.given("intermediate_size"):
            keys.only("intermediate_size", width)
        fields |= {"ffn_dim": width, "head_dim": dim, "norm": RMSNormConfig(eps=keys.number("rms_norm_eps"))}
        fields |= {"init_std": keys.number("initializer_range"), "tied_embeddings": keys.boolean("tie_word_embeddings")}
        limit = keys.number("swiglu_limit")
        fields["mlp"] = keys.make(ClampedSwiGLU, limit=limit, slope=1.0, shift=0.0)
        streams = {"count": keys.integer("hc_mult"), "sinkhorn": keys.integer("hc_sinkhorn_iters"), "eps": keys.number("hc_eps")}
        if streams["count"] == 1:
            keys.fault("hc_mult", "1 is not implemented; there are at least two residual streams")
        fields["streams"] = keys.make(Streams, **streams)
        keys.only(*SILU)
        keys.only("num_key_value_heads", 1)
        keys.only("attention_bias", None, False)
        keys.only("n_shared_experts", 1)
        keys.only("norm_topk_prob", True)
        keys.only(SWITCH, None, False)
        keys.whole(MTP_LAYERS)
        kinds, rates = _kinds(keys, fields["layers"]), _rates(keys)
        fields["rope"] = _rope(keys, dim, fields["max_length"], "window" in kinds)
        attention = {ours: keys.integer(theirs) for theirs, ours in FIELDS.items()}
        fields["attention"] = keys.make(CompressedMQA, **attention, **rates, kinds=kinds)
        scores, scaling = keys.only("scoring_func", *SCORES), keys.number("routed_scaling_factor")
        experts = read_experts(keys, "n_routed_experts", "num_local_experts", "num_experts")
        tables = _hash_layers(keys, fields["layers"])
        router = keys.make(SigmoidTopKConfig, scores=SCORES.get(str(scores)), scaling=scaling, hash_layers=tables)
        fields["moe"] = keys.make(MoEConfig, **experts, ffn_dim=width, shared=1, router=router)
        return fields

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        shape = decoder.shape
        attention, moe, streams, rope = shape.attention, shape.moe, shape.streams, shape.rope
        written: dict[str, Any] = {theirs: getattr(shape, ours) for theirs, ours in SIZES.items() if ours != "ffn_dim"}
        written |= {"num_key_value_heads": 1, "head_dim": shape.head_dim, "initializer_range": shape.init_std}
        written |= {"attention_bias": False, "attention_dropout": 0.0, "use_cache": True, MTP_LAYERS: 0} | dict([SILU])
        written |= {"rms_norm_eps": getattr(shape.norm, "eps", 0.0), "tie_word_embeddings": shape.tied_embeddings}
        written["swiglu_limit"] = getattr(shape.mlp, "limit", 0.0)
        if streams is not None:
            written |= {"hc_mult": streams.count, "hc_sinkhorn_iters": streams.sinkhorn, "hc_eps": streams.eps}
        if isinstance(attention, CompressedMQA):
            written |= {theirs: getattr(attention, ours) for theirs, ours in FIELDS.items()}
            written[LAYER_TYPES] = [TYPES[attention.kind_at(layer, shape.layers)] for layer in range(shape.layers)]
            written[RATES] = {TYPES["sparse"]: attention.sparse_rate, TYPES["heavy"]: attention.heavy_rate}
        base = self.defaults["rope_theta"] if rope.local_theta is None else rope.local_theta
        main = {"rope_type": "default", "rope_theta": base, PARTIAL: rope.partial}
        compressed = {"rope_type": "default", "rope_theta": rope.theta, PARTIAL: rope.partial}
        compressed |= scaling_of(rope) if rope.scaling != "none" else {}
        written |= {TABLES: {"main": main, "compress": compressed}, PARTIAL: rope.partial}
        written |= {"rope_theta": base, "compress_rope_theta": rope.theta}
        if moe is None:
            return written
        written |= write_experts(moe, "n_routed_experts") | {"moe_intermediate_size": moe.ffn_dim, "n_shared_experts": moe.shared}
        tables = getattr(moe.router, "hash_layers", ())
        written[MLP_TYPES] = [HASH if layer in tables else MOE for layer in range(shape.layers)]
        written["norm_topk_prob"] = getattr(moe.router, "normalize", True)
        if isinstance(moe.router, SigmoidTopKConfig):
            names = {ours: theirs for theirs, ours in SCORES.items()}
            written |= {"scoring_func": names[moe.router.scores], "routed_scaling_factor": moe.router.scaling}
        return written


def _listed(keys: Keys, key: str, allowed: Mapping[Any, str], count: int) -> list[str] | None:
    """Returns the kinds of `count` layers that a list names, which may go on; None if it is absent or wrong."""
    value = keys.values[key] if keys.given(key) else None
    if value is None:
        return None
    if (
        not isinstance(value, list)
        or len(value) < count
        or any(type(one) not in (int, str) or one not in allowed for one in value)
    ):
        keys.fault(key, f"expected {count} entries, each {' or '.join(map(repr, allowed))}")
        return None
    return [allowed[one] for one in value[:count]]


def _kinds(keys: Keys, layers: int) -> tuple[str, ...]:
    """Reads what each layer sees. Absent, kinds are those of DeepSeek-V4-Pro."""
    named = _listed(keys, LAYER_TYPES, {theirs: ours for ours, theirs in TYPES.items()}, layers)
    ratios = _listed(keys, "compress_ratios", RATIOS, layers)
    if named is not None and ratios is not None and named != ratios:
        keys.fault("compress_ratios", f"differs from {LAYER_TYPES}; keep one of them")
    return tuple(named or ratios or [CompressedMQA().kind_at(layer, layers) for layer in range(layers)])


def _rates(keys: Keys) -> dict[str, int]:
    """Reads the rates of compressed keys, in a table or in keys of their own, which come first as in the reference."""
    table = keys.values[RATES] if keys.given(RATES) else None
    names, found = {TYPES["sparse"]: "sparse_rate", TYPES["heavy"]: "heavy_rate"}, {"sparse_rate": 4, "heavy_rate": 128}
    if table is not None and not (isinstance(table, dict) and set(table) <= set(names)):
        keys.fault(RATES, f"expected a table of {' and '.join(names)}")
        table = None
    for name, field in names.items():
        found[field] = (table or {}).get(name, found[field])
        if type(found[field]) is not int or found[field] < 2:
            keys.fault(f"{RATES}.{name}", f"expected an integer of 2 or more, not {found[field]!r}")
    for key, field in {"compress_rate_csa": "sparse_rate", "compress_rate_hca": "heavy_rate"}.items():
        if keys.given(key):
            found[field] = keys.integer(key)
    return found


def _rope(keys: Keys, head_dim: int, length: int, local: bool) -> Rope:
    """Reads the rotary positions of layers with compressed keys, and, if there are such layers, those of layers without."""
    theta, compressed_theta = keys.number("rope_theta"), keys.number("compress_rope_theta")
    for key in (PARTIAL, ROTATED):
        keys.given(key)
    tables = {key: keys.values[key] for key in (TABLES, "rope_scaling") if keys.given(key) and keys.values[key] is not None}
    for key, table in tables.items():
        if not isinstance(table, dict):
            keys.fault(key, f"expected a table, not {table!r}")
            return Rope()
    if len(tables) > 1:
        keys.fault("rope_scaling", f"conflicts with {TABLES}; give one of the two")
        return Rope()
    where, table = next(iter(tables.items()), (TABLES, {}))
    if nested := "main" in table or "compress" in table:
        main, found = table.get("main"), table.get("compress")
        if set(table) != {"main", "compress"} or not isinstance(main, dict) or not isinstance(found, dict):
            keys.fault(where, "expected the tables 'main' and 'compress', and nothing else")
            return Rope()
    else:
        main, found = {"rope_theta": theta}, {**table, "rope_theta": compressed_theta}
    partial = _partial(keys, head_dim, {f"{where}.{name}": one for name, one in (("main", main), ("compress", found))})
    main, found = ({key: value for key, value in one.items() if key != PARTIAL} for one in (main, found))
    plain = read_table(keys, f"{where}.main", main, theta, length)
    fields = read_table(keys, f"{where}.compress" if nested else where, found, compressed_theta, length)
    if plain.get("scaling", "none") != "none":
        keys.fault(f"{where}.main", "a scaling of layers that see a window only is not implemented")
    if fields.get("scaling") == "yarn" and not nested:
        fields.setdefault("attention_factor", 1.0)
    if fields.get("scaling") == "dynamic":
        keys.fault(where, "dynamic scaling is not implemented, because compressed keys would turn anew")
        return Rope()
    return keys.make(Rope, **fields, partial=partial, local_theta=plain["theta"] if local else None) or Rope()


def _partial(keys: Keys, head_dim: int, tables: Mapping[str, Mapping[str, Any]]) -> float:
    """Reads the share of a head that is rotated, which may be in each table or next to them, or be a number of dimensions."""
    rotated = keys.integer(ROTATED) if keys.given(ROTATED) else None
    values = {PARTIAL: keys.values[PARTIAL] if keys.given(PARTIAL) else None}
    values |= {f"{where}.{PARTIAL}": table.get(PARTIAL) for where, table in tables.items()}
    given = {place: value for place, value in values.items() if value is not None}
    for place, value in given.items():
        if type(value) not in (int, float) or not 0 < value <= 1:
            keys.fault(place, f"expected a number above 0, 1 at most, not {value!r}")
            return 1.0
    if len(set(given.values())) > 1:
        keys.fault(PARTIAL, f"{' and '.join(f'{one} = {value}' for one, value in given.items())}: conflicting values; keep one")
        return 1.0
    partial = float(next(iter(given.values()), 64 / 512 if rotated is None else rotated / (head_dim or 1)))
    if not 0 < partial <= 1 or (rotated is not None and int(head_dim * partial) != rotated):
        keys.fault(ROTATED, f"{rotated} dimensions of head_dim {head_dim} are not the share {partial} of {PARTIAL}")
        return 1.0
    keys.settle(PARTIAL, partial)
    return partial


def _hash_layers(keys: Keys, layers: int) -> tuple[int, ...]:
    """Reads the layers whose experts a table of tokens names: the first ones, three if nothing says their number."""
    given = keys.given("num_hash_layers") and keys.values["num_hash_layers"] is not None
    count = keys.whole("num_hash_layers") if given else None
    types = _listed(keys, MLP_TYPES, {MOE: MOE, HASH: HASH}, layers)
    first = tuple(range(min(3 if count is None else count, layers)))
    if types is None:
        return first
    listed = tuple(layer for layer, kind in enumerate(types) if kind == HASH)
    if count is not None and listed != first:
        keys.fault("num_hash_layers", f"{count} differs from {MLP_TYPES}; keep one of them")
    return listed
