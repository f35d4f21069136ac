"""Qwen3 with experts (Yang et al., 2025): fine-grained experts, none shared; a window, when switched on, in every layer."""

from typing import Any, ClassVar

from forge_models.components.attentions import GQA
from forge_models.components.decoder import Decoder
from forge_models.components.moe import MoE
from forge_models.components.routers import SoftmaxTopK
from forge_models.hf.base import read_base, read_biases, read_heads, write_base, write_biases
from forge_models.hf.config import Keys
from forge_models.hf.family import Family
from forge_models.hf.ignorable import ANY
from forge_models.hf.moe import ExpertNames, normalized, read_experts, read_losses, write_experts, write_losses
from forge_models.hf.windows import read_window, write_window


class Qwen3Moe(Family):
    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    defaults: ClassVar = {
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
    }
    ignores: ClassVar = {"max_window_layers": ANY}  # the reference does not look at it
    experts: ClassVar = ExpertNames()

    def read(self, keys: Keys) -> dict[str, Any]:
        fields = read_base(keys) | read_heads(keys)
        biases, window = read_biases(keys), read_window(keys)
        window = window if keys.boolean("use_sliding_window") else None
        moe = keys.make(
            MoE,
            **read_experts(keys, "num_experts", "num_local_experts"),
            ffn_dim=keys.integer("moe_intermediate_size"),
            every=keys.integer("decoder_sparse_step"),
            first_dense=_first_dense(keys),
            router=SoftmaxTopK(normalize=keys.boolean("norm_topk_prob")),
            losses=read_losses(keys),
        )
        return fields | {"attention": GQA(**biases, qk_norm="head", window=window), "moe": moe}

    def write(self, decoder: Decoder) -> dict[str, Any]:
        written = write_base(self, decoder) | write_biases(decoder) | write_window(decoder)
        written["use_sliding_window"] = written["sliding_window"] is not None
        if (moe := decoder.shape.moe) is None:
            return written
        written |= write_experts(moe, "num_experts") | write_losses(moe) | {"moe_intermediate_size": moe.ffn_dim}
        written |= {"decoder_sparse_step": moe.every, "mlp_only_layers": list(range(moe.first_dense))}
        return written | {"norm_topk_prob": normalized(moe)}


def _first_dense(keys: Keys) -> int:
    dense = keys.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        keys.fault("mlp_only_layers", f"expected a list of layers, not {dense!r}")
        return 0
    if dense != list(range(len(dense))):
        keys.fault("mlp_only_layers", f"{dense} is not implemented; only the first layers may be dense")
    return len(dense)
