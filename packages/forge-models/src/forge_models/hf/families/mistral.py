"""Mistral (Jiang et al., 2023) and Mixtral (Jiang et al., 2024), whose feed-forward layers are experts."""

from typing import Any, ClassVar

from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig, SoftmaxTopKConfig
from forge_models.hf.config import ABSENT_OR_ZERO, Keys, Same
from forge_models.hf.family import Family, read_base, read_heads, write_base
from forge_models.hf.layers import ExpertNames, read_experts, read_losses, read_window, write_experts, write_losses, write_window


class Mistral(Family):
    """The Llama architecture with a window in every layer."""

    model_type = "mistral"
    architecture = "MistralForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "sliding_window": 4096,
    }
    ignores: ClassVar = {"norm_eps": (Same("rms_norm_eps"),)}

    def read(self, keys: Keys) -> dict[str, Any]:
        fields = read_base(keys) | read_heads(keys)
        return fields | {"attention": GQA(window=read_window(keys))}

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        return write_base(self, decoder) | write_window(decoder)


class Mixtral(Family):
    """The Mistral architecture with experts instead of every feed-forward layer."""

    model_type = "mixtral"
    architecture = "MixtralForCausalLM"
    defaults: ClassVar = {
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
    }
    ignores: ClassVar = {"router_jitter_noise": ABSENT_OR_ZERO}
    experts: ClassVar = ExpertNames(part="block_sparse_moe", matrices={"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"})

    def read(self, keys: Keys) -> dict[str, Any]:
        fields = read_base(keys, theta=1_000_000.0) | read_heads(keys)
        fields["attention"] = GQA(window=read_window(keys))
        experts = read_experts(keys, "num_local_experts", "num_experts")
        return fields | {"moe": keys.make(MoEConfig, **experts, router=SoftmaxTopKConfig(), losses=read_losses(keys))}

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        written = write_base(self, decoder) | write_window(decoder)
        if (moe := decoder.shape.moe) is None:
            return written
        return written | write_experts(moe, "num_local_experts") | write_losses(moe) | {"intermediate_size": moe.ffn_dim}
