"""OLMo, OLMo-2, OLMo-3 and OLMoE."""

from typing import Any, ClassVar

from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig, SoftmaxTopKConfig
from forge_models.components.layers import LayerNormConfig
from forge_models.hf.config import Keys
from forge_models.hf.family import Family, read_base, read_biases, read_heads, write_base, write_biases
from forge_models.hf.layers import (
    ExpertNames,
    normalized,
    read_experts,
    read_losses,
    read_period,
    write_experts,
    write_local_layers,
    write_losses,
)


class Olmo(Family):
    """Layer norms without parameters (Groeneveld et al., 2024); their `eps` is fixed."""

    model_type = "olmo"
    architecture = "OlmoForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": None,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }
    ignores: ClassVar = {"clip_qkv": (None,)}

    def read(self, keys: Keys) -> dict[str, Any]:
        norm = LayerNormConfig(eps=1e-5, weight=False, bias=False)
        return read_base(keys, eps=None) | read_heads(keys) | {"norm": norm, "attention": GQA(**read_biases(keys))}

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        return write_base(self, decoder, eps=None) | write_biases(decoder)


class Olmo2(Family):
    """Norms after each part of a block, and norms of the full q and k (OLMo et al., 2024)."""

    model_type = "olmo2"
    architecture = "Olmo2ForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": None,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }
    parts: ClassVar = {
        "attention": "self_attn",
        "mlp": "mlp",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }

    def read(self, keys: Keys) -> dict[str, Any]:
        fields = read_base(keys) | read_heads(keys)
        return fields | {"norm_placement": "post", "attention": GQA(**read_biases(keys), qk_norm="full")}

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        return write_base(self, decoder) | write_biases(decoder)


class Olmo3(Family):
    """OLMo-2 with three local layers for each global one; only angles of global layers are scaled (OLMo et al., 2025)."""

    model_type = "olmo3"
    architecture = "Olmo3ForCausalLM"
    defaults: ClassVar = {**Olmo2.defaults, "sliding_window": 4096}
    parts: ClassVar = Olmo2.parts

    def read(self, keys: Keys) -> dict[str, Any]:
        fields = read_base(keys, theta=500_000.0, local_theta=500_000.0) | read_heads(keys)
        attention = GQA(**read_biases(keys), qk_norm="full", **read_period(keys, 4))
        return fields | {"norm_placement": "post", "attention": attention}

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        return write_base(self, decoder) | write_biases(decoder) | write_local_layers(decoder)


class Olmoe(Family):
    """Fine-grained experts in every layer, none shared, and norms of the full q and k (Muennighoff et al., 2024)."""

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
        router = SoftmaxTopKConfig(normalize=keys.boolean("norm_topk_prob"))
        return fields | {"moe": keys.make(MoEConfig, **experts, router=router, losses=read_losses(keys))}

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        written = write_base(self, decoder) | write_biases(decoder)
        if (moe := decoder.shape.moe) is None:
            return written
        written |= write_experts(moe, "num_experts") | write_losses(moe)
        return written | {"intermediate_size": moe.ffn_dim, "norm_topk_prob": normalized(moe)}
