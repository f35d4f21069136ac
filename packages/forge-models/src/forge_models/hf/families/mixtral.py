"""Mixtral (Jiang et al., 2024): the Mistral shape, every feed-forward part replaced by experts."""

from forge_models.hf.family import Family
from forge_models.hf.ignorable import NONE
from forge_models.hf.moe import Sparse

MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    defaults={
        "num_key_value_heads": 8,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "sliding_window": None,
        "num_local_experts": 8,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "num_experts_per_tok": 2,
    },
    qkv_bias=False,
    windows="all",
    theta=1_000_000.0,
    ignores={"router_jitter_noise": NONE},
    sparse=Sparse(
        auxiliary=True,
        experts=("num_local_experts", "num_experts"),
        part="block_sparse_moe",
        matrices={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    ),
)
