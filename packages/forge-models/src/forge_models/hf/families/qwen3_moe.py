"""Qwen3 with experts (Yang et al., 2025): fine-grained experts, none shared; a window, when switched on, in every layer."""

from forge_models.hf.family import Family
from forge_models.hf.ignorable import ANY
from forge_models.hf.moe import Sparse

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    defaults={
        "num_key_value_heads": 4,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "num_experts": 128,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": False,
    },
    qk_norm="head",
    windows="switch",
    ignores={"max_window_layers": ANY},  # the reference does not look at it
    sparse=Sparse(
        auxiliary=True,
        experts=("num_experts", "num_local_experts"),
        width="moe_intermediate_size",
        normalize="norm_topk_prob",
        layers="step",
    ),
)
