"""Kimi Linear (Kimi Team, 2025): Kimi Delta Attention in most layers, latent attention without positions in the others, and the
experts of DeepSeek-V3.

Published folders name the feed-forward layers of dense layers `mlp`; transformers writes them under the name of the experts, and
reads both.
"""

from types import MappingProxyType
from typing import Any, ClassVar

from forge_models.components.attentions import MLA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig, SigmoidTopKConfig
from forge_models.components.kimi_delta import KDA
from forge_models.components.layers import RMSNormConfig
from forge_models.components.recurrent import Hybrid
from forge_models.hf.config import ABSENT_OR_ZERO, ANY_VALUE, Keys, same_value
from forge_models.hf.families.mistral import MATRICES
from forge_models.hf.family import Family
from forge_models.hf.layers import FULL, ExpertNames, normalized, period_of, read_latent, write_latent
from forge_models.hf.recurrent import LINEAR, kimi_places, kinds_of, write_kinds

OTHER = MappingProxyType(
    {
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts": "num_local_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
    }
)
"""Published key -> its other name in transformers, which reads both."""
TABLE = "linear_attn_config"
SIZES = MappingProxyType(
    {"linear_num_heads": "num_heads", "linear_head_dim": "head_dim", "linear_conv_kernel_dim": "short_conv_kernel_size"}
)
"""Key of a size of the recurrent layers -> its name in the published table, which comes first."""
LISTS = MappingProxyType({"full_attn_layers": FULL, "kda_layers": LINEAR})
"""Entry of the published table with layers, counted from 1 -> their kind."""
TYPES, MLP_TYPES, FIRST_DENSE = "layer_types", "mlp_layer_types", "first_k_dense_replace"
DENSE, SPARSE = "dense", "sparse"
FIXED = MappingProxyType(
    {"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "use_grouped_topk": True, "moe_layer_freq": 1}
)
"""Published keys that transformers does not read, with the values that describe what it computes."""


class KimiLinear(Family):
    model_type = "kimi_linear"
    architecture = "KimiLinearForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": 32,
        "hidden_act": "silu",
        "model_max_length": 1048576,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "linear_num_heads": 32,
        "linear_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "moe_intermediate_size": 1024,
        "num_shared_experts": 1,
        "moe_renormalize": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.446,
    }
    ignores: ClassVar = {
        # No layer has rotary positions, or heads of this width.
        **dict.fromkeys(("rope_theta", "head_dim", "output_router_logits"), ANY_VALUE),
        **dict.fromkeys(("rope_scaling", "rope_parameters"), (None,)),
        **{key: (value,) for key, value in FIXED.items()},
        "num_nextn_predict_layers": ABSENT_OR_ZERO,
    }
    experts: ClassVar = ExpertNames(part="block_sparse_moe", matrices=MATRICES, bias="gate.e_score_correction_bias")
    recurrent: ClassVar = "self_attn"
    recurrent_parts: ClassVar = (KDA,)
    recurrent_places: ClassVar = staticmethod(kimi_places)

    def spelled(self, decoder: DecoderConfig, name: str) -> str:
        """transformers saves the feed-forward layers of dense layers under the name of the experts."""
        layer = name.removeprefix(f"{self.layers}.").partition(".")[0]
        dense = layer.isdecimal() and not decoder.shape.has_experts(int(layer))
        return name.replace(".block_sparse_moe.", ".mlp.") if dense else name

    def read(self, keys: Keys) -> dict[str, Any]:
        eps = keys.number("rms_norm_eps")
        fields: dict[str, Any] = {
            "dim": keys.integer("hidden_size"),
            "layers": keys.integer("num_hidden_layers"),
            "heads": keys.integer("num_attention_heads"),
            "ffn_dim": keys.integer("intermediate_size"),
            "vocab_size": keys.integer("vocab_size"),
            "max_length": keys.integer(_spelling(keys, "model_max_length")),
            "init_std": keys.number("initializer_range"),
        }
        keys.only("hidden_act", "silu")
        keys.only("tie_word_embeddings", False)
        latent = read_latent(keys, rotates=False)
        fields["head_dim"] = latent["qk_rope_head_dim"]  # no layer uses it, but it must be valid
        table = _table(keys)
        full, types, sizes = keys.make(MLA, **latent), _types(keys, table, fields["layers"]), _sizes(keys, table)
        if set(types) == {FULL}:
            fields["attention"] = full
        else:
            recurrent = keys.make(KDA, **sizes, norm_eps=eps)
            fields["attention"] = keys.make(Hybrid, **kinds_of(types), recurrent=recurrent, full=full)
        if eps:
            fields["norm"] = RMSNormConfig(eps=eps)
        return fields | {"moe": _experts(keys, _mlp_types(keys, fields["layers"]))}

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        shape, moe, attention = decoder.shape, decoder.shape.moe, decoder.shape.attention
        written: dict[str, Any] = {
            "hidden_size": shape.dim,
            "num_hidden_layers": shape.layers,
            "intermediate_size": shape.ffn_dim,
        }
        written |= {"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "vocab_size": shape.vocab_size}
        written |= {"model_max_length": shape.max_length, "initializer_range": shape.init_std, "hidden_act": "silu"}
        written |= {"rms_norm_eps": getattr(shape.norm, "eps", 0.0), "tie_word_embeddings": False, "use_cache": True}
        written |= write_latent(decoder) | FIXED
        written |= write_kinds(decoder) or {TYPES: [FULL] * decoder.layers}
        recurrent = getattr(attention, "recurrent", None)
        if isinstance(recurrent, KDA):
            part = recurrent.resolved(shape.context(0))
            table = {"num_heads": part.heads, "head_dim": part.head_dim, "short_conv_kernel_size": part.conv_width}
            lists = {key: [at + 1 for at, other in enumerate(written[TYPES]) if other == kind] for key, kind in LISTS.items()}
            written[TABLE] = table | lists
        experts = [shape.has_experts(layer) for layer in range(decoder.layers)]
        written[MLP_TYPES] = [SPARSE if sparse else DENSE for sparse in experts]
        if moe is None:
            return written
        if moe.every == 1:
            written[FIRST_DENSE] = moe.first_dense
        written |= {"num_experts": moe.experts, "num_experts_per_token": moe.top_k, "moe_intermediate_size": moe.ffn_dim}
        written |= {"num_shared_experts": moe.shared, "moe_renormalize": normalized(moe)}
        router = moe.router
        if isinstance(router, SigmoidTopKConfig):
            written |= {"num_expert_group": router.n_group, "topk_group": router.groups_kept}
            written["routed_scaling_factor"] = router.scaling
        return written


def _spelling(keys: Keys, name: str) -> str:
    """Returns the name by which the file has a published key; two names must have one value."""
    other = OTHER[name]
    if not keys.given(other):
        return name
    if keys.given(name) and not same_value(keys.values[name], keys.values[other]):
        keys.fault(name, f"{keys.values[name]!r} differs from {other} {keys.values[other]!r}; keep one of them")
    return other


def _table(keys: Keys) -> dict[str, Any]:
    """Returns the published table of the recurrent layers; empty if there is none."""
    table = keys.values[TABLE] if keys.given(TABLE) else None
    if not isinstance(table, dict | None):
        keys.fault(TABLE, f"expected a table, not {table!r}")
    if not isinstance(table, dict):
        return {}
    for name in sorted(set(table) - {*SIZES.values(), *LISTS}):
        if not keys.ignored(f"{TABLE}.{name}"):
            keys.fault(f"{TABLE}.{name}", "is not implemented")
    return table


def _sizes(keys: Keys, table: dict[str, Any]) -> dict[str, int]:
    """Reads the sizes of `KDA`, of which those in the table come first, as in the reference."""
    found = {}
    for (key, entry), field in zip(SIZES.items(), ("heads", "head_dim", "conv_width"), strict=True):
        found[field] = keys.integer(key)
        if entry not in table:
            continue
        if type(table[entry]) is not int or table[entry] < 1:
            keys.fault(f"{TABLE}.{entry}", f"expected a positive integer, not {table[entry]!r}")
        found[field] = table[entry]
    return found


def _types(keys: Keys, table: dict[str, Any], layers: int) -> list[str]:
    """Reads the kind of attention of every layer. Absent, every fourth layer after the first has full attention."""
    types = keys.values[TYPES] if keys.given(TYPES) else None
    listed = _listed(keys, table, layers)
    if types is None:
        return listed or [FULL if layer and layer % 4 == 0 else LINEAR for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers or any(kind not in (FULL, LINEAR) for kind in types):
        keys.fault(TYPES, f"expected {layers} times {FULL!r} or {LINEAR!r}")
        return [FULL] * layers
    if listed and listed != types:
        keys.fault(TYPES, f"differs from the layers that {TABLE} lists; keep one of them")
    return types


def _listed(keys: Keys, table: dict[str, Any], layers: int) -> list[str]:
    """Returns the kinds of layers that the table lists; empty if it lists none."""
    if not set(LISTS) & set(table):
        return []
    kinds: dict[int, str] = {}
    for name, kind in LISTS.items():
        entries = table.get(name)
        if not isinstance(entries, list) or any(type(entry) is not int for entry in entries):
            keys.fault(f"{TABLE}.{name}", f"expected a list of layers, counted from 1, not {entries!r}")
            return []
        kinds |= dict.fromkeys(entries, kind)
    count = sum(len(table[name]) for name in LISTS)
    if sorted(kinds) != list(range(1, layers + 1)) or count != layers:
        keys.fault(TABLE, f"expected each of the layers 1 to {layers} in one of {' and '.join(LISTS)}")
        return []
    return [kinds[layer + 1] for layer in range(layers)]


def _mlp_types(keys: Keys, layers: int) -> list[str]:
    """Reads which layers have experts. Absent, all but the first have."""
    first = keys.whole(FIRST_DENSE) if keys.given(FIRST_DENSE) else None
    counted = [DENSE if layer < (1 if first is None else first) else SPARSE for layer in range(layers)]
    types = keys.values[MLP_TYPES] if keys.given(MLP_TYPES) else None
    if types is None:
        return counted
    if not isinstance(types, list) or len(types) != layers or any(kind not in (DENSE, SPARSE) for kind in types):
        keys.fault(MLP_TYPES, f"expected {layers} times {DENSE!r} or {SPARSE!r}")
        return counted
    if first is not None and counted != types:
        keys.fault(FIRST_DENSE, f"{first} differs from {MLP_TYPES}; keep one of them")
    return types


def _experts(keys: Keys, types: list[str]) -> MoEConfig | None:
    sizes = {
        "experts": keys.integer(_spelling(keys, "num_experts")),
        "top_k": keys.integer(_spelling(keys, "num_experts_per_token")),
        "ffn_dim": keys.integer("moe_intermediate_size"),
        "shared": keys.integer(_spelling(keys, "num_shared_experts")),
    }
    normalize = keys.boolean(_spelling(keys, "moe_renormalize"))
    groups, kept = keys.integer(_spelling(keys, "num_expert_group")), keys.integer("topk_group")
    scaling = keys.number("routed_scaling_factor")
    if 0 < groups < kept:
        keys.fault("topk_group", f"{kept} is more than num_expert_group {groups}")
    if SPARSE not in types:
        return None
    where = period_of([kind == SPARSE for kind in types])
    if where is None:
        keys.fault(MLP_TYPES, "mixes layers in a way that is not implemented; those with experts must follow at equal distances")
        return None
    router = keys.make(SigmoidTopKConfig, normalize=normalize, scaling=scaling, n_group=groups, topk_group=kept)
    return keys.make(MoEConfig, **sizes, every=where[0], first_dense=where[1], router=router)
