"""MiniMax-M2 (2025): experts without groups, chosen by sigmoid scores with a bias; norms over all heads' q and k together.

Published folders have weights in fp8, which are refused with `quantization_config`, and give the rotated part of a head as
`rotary_dim`. Their MTP modules do not affect logits and are not read.
"""

from typing import Any, ClassVar

from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig, SigmoidTopKConfig
from forge_models.hf.config import ABSENT_OR_ZERO, ANY_VALUE, Keys
from forge_models.hf.families.mistral import MATRICES
from forge_models.hf.family import Family, read_base, read_heads, write_base
from forge_models.hf.layers import ExpertNames, read_experts, read_losses, write_experts, write_losses
from forge_models.hf.rope import PARTIAL

ROTATED = "rotary_dim"
"""Key of the number of dimensions of a head that rotate."""
KINDS = "attn_type_list"
"""Key of the kind of attention of each layer, in published folders."""


class MiniMaxM2(Family):
    model_type = "minimax_m2"
    architecture = "MiniMaxM2ForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 196608,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "num_local_experts": 256,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "num_experts_per_tok": 8,
    }
    ignores: ClassVar = {
        "router_jitter_noise": ABSENT_OR_ZERO,
        "scoring_func": ("sigmoid",),
        "use_qk_norm": (True,),
        "qk_norm_type": ("per_layer",),
        "use_routing_bias": (True,),
        "shared_intermediate_size": ABSENT_OR_ZERO,
        "sliding_window": (None,),
        **dict.fromkeys(("num_mtp_modules", "mtp_transformer_layers", "use_mtp", "mlp_intermediate_size"), ANY_VALUE),
    }
    experts: ClassVar = ExpertNames(part="block_sparse_moe", matrices=MATRICES, bias="e_score_correction_bias")
    mtp_modules: ClassVar = ("model.mtp.",)

    def read(self, keys: Keys) -> dict[str, Any]:
        heads = read_heads(keys)
        fields = read_base(keys, theta=5_000_000.0, partial=_rotated(keys, heads["head_dim"])) | heads
        if keys.given(KINDS) and keys.values[KINDS] != [1] * fields["layers"]:
            keys.fault(KINDS, f"expected {fields['layers']} times 1; only layers with softmax attention are implemented")
        router = SigmoidTopKConfig(normalize=True)
        experts = read_experts(keys, "num_local_experts", "num_experts")
        fields["attention"] = GQA(qk_norm="full")
        return fields | {"moe": keys.make(MoEConfig, **experts, router=router, losses=read_losses(keys))}

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        written = write_base(self, decoder) | {PARTIAL: decoder.rope.partial}
        if (moe := decoder.shape.moe) is None:
            return written
        return written | write_experts(moe, "num_local_experts") | write_losses(moe) | {"intermediate_size": moe.ffn_dim}


def _rotated(keys: Keys, head_dim: int) -> float:
    """Reads the share of a head that `rotary_dim` rotates; 1 if the key is absent."""
    if not keys.given(ROTATED):
        return 1.0
    rotated = keys.integer(ROTATED)
    if rotated > head_dim > 0:
        keys.fault(ROTATED, f"{rotated} is more than head_dim {head_dim}")
        return 1.0
    return rotated / head_dim if rotated and head_dim else 1.0
