"""GLM-4.5 to 4.7 (Zeng et al., 2025): experts as in DeepSeek-V3 with grouped-query attention that rotates half of each head.

Its MTP modules come after the last layer; they do not affect logits and are not read.
"""

from typing import Any, ClassVar

from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig
from forge_models.hf.config import ANY_VALUE, Keys
from forge_models.hf.families.deepseek import MTP_LAYERS, read_sigmoid_router, write_sigmoid_router
from forge_models.hf.family import Family, read_base, read_heads, write_base
from forge_models.hf.layers import ExpertNames, normalized, read_experts, write_experts
from forge_models.hf.rope import PARTIAL

BIAS, QK_NORM = "attention_bias", "use_qk_norm"
"""Keys of the biases of q, k and v (the output has none), and of the norms of each head's q and k."""


class Glm4Moe(Family):
    model_type = "glm4_moe"
    architecture = "Glm4MoeForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        BIAS: False,
        QK_NORM: False,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        MTP_LAYERS: 1,
    }
    ignores: ClassVar = {"output_router_logits": ANY_VALUE, "num_mtp_layers": ANY_VALUE}  # the reference adds no loss
    experts: ClassVar = ExpertNames(bias="gate.e_score_correction_bias")
    mtp_layers: ClassVar = MTP_LAYERS

    def read(self, keys: Keys) -> dict[str, Any]:
        fields = read_base(keys, partial=0.5) | read_heads(keys)
        fields["attention"] = GQA(qkv_bias=keys.boolean(BIAS), qk_norm="head" if keys.boolean(QK_NORM) else "none")
        fields["moe"] = keys.make(
            MoEConfig,
            **read_experts(keys, "n_routed_experts", "num_local_experts", "num_experts"),
            ffn_dim=keys.integer("moe_intermediate_size"),
            shared=keys.integer("n_shared_experts"),
            first_dense=keys.whole("first_k_dense_replace"),
            router=read_sigmoid_router(keys),
        )
        keys.whole(MTP_LAYERS)
        return fields

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        attention: Any = decoder.shape.attention
        written = write_base(self, decoder) | {PARTIAL: decoder.rope.partial, BIAS: getattr(attention, "qkv_bias", False)}
        written[QK_NORM] = getattr(attention, "qk_norm", "none") == "head"
        if (moe := decoder.shape.moe) is not None:
            written |= write_experts(moe, "n_routed_experts") | write_sigmoid_router(moe.router)
            written |= {"moe_intermediate_size": moe.ffn_dim, "n_shared_experts": moe.shared}
            written |= {"first_k_dense_replace": moe.first_dense, "norm_topk_prob": normalized(moe)}
        return written | {MTP_LAYERS: 0}
