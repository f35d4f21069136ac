"""DeepSeek-V3 (2024): latent attention, groups of fine-grained experts chosen with a bias, shared experts, first layers dense;
and DeepSeek-V3.2 (2025), whose attention has an indexer.

Their MTP modules come after the last layer; they do not affect logits and are not read.
"""

from types import MappingProxyType
from typing import Any, ClassVar

from forge_models.components.attentions import MLA, IndexedMLA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig, SigmoidTopKConfig
from forge_models.hf.config import ANY_VALUE, Keys
from forge_models.hf.family import Family, read_base, write_base
from forge_models.hf.layers import ExpertNames, normalized, read_experts, read_latent, write_experts, write_latent

MTP_LAYERS = "num_nextn_predict_layers"
"""Key of the number of MTP modules."""

FIXED = MappingProxyType({"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1})
"""Keys that the reference code does not support changing, with their only valid values."""


class DeepseekV3(Family):
    model_type = "deepseek_v3"
    architecture = "DeepseekV3ForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_interleave": True,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 1,
    }
    ignores: ClassVar = dict.fromkeys(
        ("aux_loss_alpha", "seq_aux", "ep_size", "pretraining_tp", "output_router_logits"), ANY_VALUE
    )
    experts: ClassVar = ExpertNames(bias="gate.e_score_correction_bias")
    mtp_layers: ClassVar = MTP_LAYERS

    def read(self, keys: Keys) -> dict[str, Any]:
        fields = read_base(keys)
        latent = read_latent(keys)
        fields["head_dim"] = latent["qk_rope_head_dim"]  # MLA does not use it, but it must be valid
        fields["attention"] = self.attention(keys, latent)
        fields["moe"] = keys.make(
            MoEConfig,
            **read_experts(keys, "n_routed_experts", "num_local_experts", "num_experts"),
            ffn_dim=keys.integer("moe_intermediate_size"),
            shared=keys.integer("n_shared_experts"),
            first_dense=keys.whole("first_k_dense_replace"),
            router=read_sigmoid_router(keys),
        )
        for key, value in FIXED.items():
            if keys.given(key):
                keys.only(key, value)
        keys.whole(MTP_LAYERS)
        return fields

    def attention(self, keys: Keys, latent: dict[str, Any]) -> MLA | None:
        """Reads the attention; `latent` are its fields from `read_latent`."""
        return keys.make(MLA, **latent)

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        written = write_base(self, decoder) | write_latent(decoder)
        if (moe := decoder.shape.moe) is not None:
            written |= write_experts(moe, "n_routed_experts") | {"moe_intermediate_size": moe.ffn_dim}
            written |= {
                "n_shared_experts": moe.shared,
                "first_k_dense_replace": moe.first_dense,
                "norm_topk_prob": normalized(moe),
            }
            written |= write_sigmoid_router(moe.router) | FIXED
        return written | {MTP_LAYERS: 0}


INDEXER = MappingProxyType({"index_n_heads": "index_heads", "index_head_dim": "index_dim", "index_topk": "top_k"})
"""Key of the indexer -> field of `IndexedMLA`."""


class DeepseekV32(DeepseekV3):
    model_type = "deepseek_v32"
    architecture = "DeepseekV32ForCausalLM"
    defaults: ClassVar = {
        **DeepseekV3.defaults,
        "max_position_embeddings": 163840,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 2048,
    }
    ignores: ClassVar = {**DeepseekV3.ignores, "mlp_bias": (None, False)}

    def read(self, keys: Keys) -> dict[str, Any]:
        fields = super().read(keys)
        layers, dense = fields["layers"], keys.whole("first_k_dense_replace")
        kinds = {"layer_types": ["indexed_attention"] * layers}
        kinds["mlp_layer_types"] = ["dense" if layer < dense else "sparse" for layer in range(layers)]
        for key, value in kinds.items():
            if keys.given(key):
                keys.only(key, None, value)
        return fields

    def attention(self, keys: Keys, latent: dict[str, Any]) -> MLA | None:
        """Reads the attention with its indexer."""
        fields = latent | {field: keys.integer(key) for key, field in INDEXER.items()}
        if latent["q_lora_rank"] is None:
            keys.fault("q_lora_rank", "is null, but the indexer's queries come from the latent of the queries")
            return None
        return keys.make(IndexedMLA, **fields)

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        attention = decoder.shape.attention
        return super().write(decoder) | {key: getattr(attention, field, None) for key, field in INDEXER.items()}


def read_sigmoid_router(keys: Keys) -> SigmoidTopKConfig | None:
    """Reads a router with groups, a bias and a factor; collects faults in `keys`."""
    normalize = keys.boolean("norm_topk_prob")
    groups, kept, scaling = keys.integer("n_group"), keys.integer("topk_group"), keys.number("routed_scaling_factor")
    if 0 < groups < kept:
        keys.fault("topk_group", f"{kept} is more than n_group {groups}")
    return keys.make(SigmoidTopKConfig, normalize=normalize, scaling=scaling, n_group=groups, topk_group=kept)


def write_sigmoid_router(router: Any) -> dict[str, Any]:
    """Returns the keys of `read_sigmoid_router`, without `norm_topk_prob`; empty for another router."""
    if not isinstance(router, SigmoidTopKConfig):
        return {}
    return {"n_group": router.n_group, "topk_group": router.groups_kept, "routed_scaling_factor": router.scaling}
