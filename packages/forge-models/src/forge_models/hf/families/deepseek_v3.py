"""DeepSeek-V3 (2024): latent attention, groups of fine-grained experts chosen with a bias, shared ones, first layers dense.

Its MTP modules come after the last layer; they change no logit and are not read.
"""

from forge_models.hf.family import Family
from forge_models.hf.ignorable import ANY
from forge_models.hf.moe import Sparse

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    defaults={
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
    },
    qkv_bias=False,
    latent=True,
    sparse=Sparse(
        experts=("n_routed_experts", "num_local_experts", "num_experts"),
        width="moe_intermediate_size",
        router="sigmoid",
        normalize="norm_topk_prob",
        layers="first",
        shared="n_shared_experts",
        bias="gate.e_score_correction_bias",
        fixed={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
    ),
    mtp_layers="num_nextn_predict_layers",
    ignores=dict.fromkeys(("aux_loss_alpha", "seq_aux", "ep_size", "pretraining_tp", "output_router_logits"), ANY),
)
