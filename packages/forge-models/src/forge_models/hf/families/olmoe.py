"""OLMoE (Muennighoff et al., 2024): fine-grained experts in every layer, none shared, and norms of the whole q and k."""

from typing import Any, ClassVar

from forge_models.components.attentions import GQA
from forge_models.components.decoder import Decoder
from forge_models.components.moe import MoE
from forge_models.components.routers import SoftmaxTopK
from forge_models.hf.base import read_base, read_biases, read_heads, write_base, write_biases
from forge_models.hf.config import Keys
from forge_models.hf.family import Family
from forge_models.hf.moe import ExpertNames, normalized, read_experts, read_losses, write_experts, write_losses


class Olmoe(Family):
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
        router = SoftmaxTopK(normalize=keys.boolean("norm_topk_prob"))
        return fields | {"moe": keys.make(MoE, **experts, router=router, losses=read_losses(keys))}

    def write(self, decoder: Decoder) -> dict[str, Any]:
        written = write_base(self, decoder) | write_biases(decoder)
        if (moe := decoder.shape.moe) is None:
            return written
        written |= write_experts(moe, "num_experts") | write_losses(moe)
        return written | {"intermediate_size": moe.ffn_dim, "norm_topk_prob": normalized(moe)}
