"""OLMoE (Muennighoff et al., 2024): fine-grained experts in every layer, none shared, and norms of the whole q and k."""

from forge_models.hf.family import Family
from forge_models.hf.moe import Sparse

OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    defaults={
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
    },
    qk_norm="full",
    ignores={"clip_qkv": (None,)},
    sparse=Sparse(auxiliary=True, experts=("num_experts", "num_local_experts"), normalize="norm_topk_prob"),
)
