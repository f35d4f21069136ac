"""Qwen2 and 2.5 (Yang et al., 2024), Qwen3 and Qwen3 with experts (Yang et al., 2025), and Qwen3-Next (2025)."""

from dataclasses import replace
from typing import Any, ClassVar

from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig, SoftmaxTopKConfig
from forge_models.components.recurrent import Hybrid
from forge_models.hf.config import ANY_VALUE, Keys
from forge_models.hf.family import Family, read_base, read_biases, read_heads, write_base, write_biases
from forge_models.hf.layers import (
    SLIDING,
    ExpertNames,
    normalized,
    read_experts,
    read_local_layers,
    read_losses,
    read_window,
    write_experts,
    write_local_layers,
    write_losses,
    write_window,
)
from forge_models.hf.recurrent import read_delta_net, read_kinds, write_kinds
from forge_models.hf.rope import PARTIAL


class Qwen2(Family):
    """Qwen2 and 2.5: biases of q, k and v; optionally a window in the upper layers."""

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": 32,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }

    def read(self, keys: Keys) -> dict[str, Any]:
        fields = read_base(keys) | read_heads(keys)
        return fields | {"attention": GQA(qkv_bias=True, **read_upper_windows(keys))}

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        return write_base(self, decoder) | write_upper_windows(decoder)


def read_upper_windows(keys: Keys) -> dict[str, Any]:
    """Reads the fields of the attention: if `use_sliding_window` is true, layers from `max_window_layers` on have a window."""
    window, used, first = read_window(keys), keys.boolean("use_sliding_window"), keys.whole("max_window_layers")
    window = window if used else None
    return read_local_layers(keys, window, lambda layer: window is not None and layer >= first)


def write_upper_windows(decoder: DecoderConfig) -> dict[str, Any]:
    """Returns the keys of `read_upper_windows`."""
    written = write_local_layers(decoder)
    local = [layer for layer, kind in enumerate(written["layer_types"]) if kind == SLIDING]
    return written | {"use_sliding_window": bool(local), "max_window_layers": local[0] if local else decoder.layers}


class Qwen3(Family):
    """Dense Qwen3: norms of each head's q and k."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }

    def read(self, keys: Keys) -> dict[str, Any]:
        fields = read_base(keys) | read_heads(keys)
        return fields | {"attention": GQA(**read_biases(keys), qk_norm="head", **read_upper_windows(keys))}

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        return write_base(self, decoder) | write_biases(decoder) | write_upper_windows(decoder)


class Qwen3Moe(Family):
    """Qwen3 with fine-grained experts, none shared; optionally a window in every layer."""

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
    ignores: ClassVar = {"max_window_layers": ANY_VALUE}  # the reference ignores it
    experts: ClassVar = ExpertNames()

    def read(self, keys: Keys) -> dict[str, Any]:
        fields = read_base(keys) | read_heads(keys)
        biases, window = read_biases(keys), read_window(keys)
        window = window if keys.boolean("use_sliding_window") else None
        moe = keys.make(
            MoEConfig,
            **read_experts(keys, "num_experts", "num_local_experts"),
            ffn_dim=keys.integer("moe_intermediate_size"),
            every=keys.integer("decoder_sparse_step"),
            first_dense=_first_dense(keys),
            router=SoftmaxTopKConfig(normalize=keys.boolean("norm_topk_prob")),
            losses=read_losses(keys),
        )
        return fields | {"attention": GQA(**biases, qk_norm="head", window=window), "moe": moe}

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        written = write_base(self, decoder) | write_biases(decoder) | write_window(decoder)
        written["use_sliding_window"] = written["sliding_window"] is not None
        if (moe := decoder.shape.moe) is None:
            return written
        written |= write_experts(moe, "num_experts") | write_losses(moe) | {"moe_intermediate_size": moe.ffn_dim}
        written |= {"decoder_sparse_step": moe.every, "mlp_only_layers": list(range(moe.first_dense))}
        return written | {"norm_topk_prob": normalized(moe)}


SHARED = "shared_expert_intermediate_size"
"""Key of the width of all shared experts together."""


class Qwen2Moe(Family):
    """Qwen1.5 and Qwen2 with fine-grained experts, and a gate on the shared ones (Yang et al., 2024)."""

    model_type = "qwen2_moe"
    architecture = "Qwen2MoeForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": 16,
        "head_dim": None,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "qkv_bias": True,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "num_experts": 60,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        SHARED: 5632,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": False,
    }
    experts: ClassVar = ExpertNames(shared="shared_expert", shared_gate="shared_expert_gate.weight")

    def read(self, keys: Keys) -> dict[str, Any]:
        fields = read_base(keys) | read_heads(keys)
        used, most = keys.boolean("use_sliding_window"), keys.whole("max_window_layers")
        window = read_window(keys) if used or keys.get("sliding_window") != 0 else None  # the reference saves 0 if not used
        window = window if used else None
        local = read_local_layers(keys, window, lambda layer: window is not None and layer < most and layer % 2 == 0)
        width = keys.integer("moe_intermediate_size")
        moe = keys.make(
            MoEConfig,
            **read_experts(keys, "num_experts", "num_local_experts"),
            ffn_dim=width,
            shared=read_shared(keys, width),
            shared_gate=True,
            every=keys.integer("decoder_sparse_step"),
            first_dense=_first_dense(keys),
            router=SoftmaxTopKConfig(normalize=keys.boolean("norm_topk_prob")),
            losses=read_losses(keys),
        )
        return fields | {"attention": GQA(qkv_bias=keys.boolean("qkv_bias"), **local), "moe": moe}

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        written = write_base(self, decoder) | write_local_layers(decoder)
        written |= {"qkv_bias": getattr(decoder.shape.attention, "qkv_bias", False), "max_window_layers": decoder.layers}
        written["use_sliding_window"] = written["sliding_window"] is not None
        if (moe := decoder.shape.moe) is None:
            return written
        written |= write_experts(moe, "num_experts") | write_losses(moe) | {"moe_intermediate_size": moe.ffn_dim}
        written |= {SHARED: moe.shared * moe.ffn_dim, "norm_topk_prob": normalized(moe)}
        return written | {"decoder_sparse_step": moe.every, "mlp_only_layers": list(range(moe.first_dense))}


class Qwen3Next(Family):
    """Gated DeltaNet in three of four layers; attention with a gate on its output, norms with weights 1 + w (Qwen, 2025).

    Its MTP modules do not affect logits and are not read.
    """

    model_type = "qwen3_next"
    architecture = "Qwen3NextForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": 2,
        "head_dim": 256,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "num_experts": 512,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        SHARED: 512,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    ignores: ClassVar = {"use_sliding_window": (None, False)}
    experts: ClassVar = Qwen2Moe.experts
    recurrent: ClassVar = "linear_attn"
    mtp_modules: ClassVar = ("mtp.",)

    def read(self, keys: Keys) -> dict[str, Any]:
        fields = read_base(keys, partial=0.25) | read_heads(keys)
        fields["norm"] = replace(fields["norm"], offset=1)
        width = keys.integer("moe_intermediate_size")
        moe = keys.make(
            MoEConfig,
            **read_experts(keys, "num_experts", "num_local_experts"),
            ffn_dim=width,
            shared=read_shared(keys, width),
            shared_gate=True,
            every=keys.integer("decoder_sparse_step"),
            first_dense=_first_dense(keys),
            router=SoftmaxTopKConfig(normalize=keys.boolean("norm_topk_prob")),
            losses=read_losses(keys),
        )
        full = GQA(**read_biases(keys), qk_norm="head", output_gate=True)
        attention = keys.make(Hybrid, **read_kinds(keys, 4), recurrent=read_delta_net(keys), full=full)
        return fields | {"attention": attention, "moe": moe}

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        full = getattr(decoder.shape.attention, "full", None)
        written = write_base(self, decoder) | {PARTIAL: decoder.rope.partial} | write_kinds(decoder)
        written["attention_bias"] = getattr(full, "output_bias", False)
        if (moe := decoder.shape.moe) is None:
            return written
        written |= write_experts(moe, "num_experts") | write_losses(moe) | {"moe_intermediate_size": moe.ffn_dim}
        written |= {SHARED: moe.shared * moe.ffn_dim, "norm_topk_prob": normalized(moe)}
        return written | {"decoder_sparse_step": moe.every, "mlp_only_layers": list(range(moe.first_dense))}


def read_shared(keys: Keys, width: int) -> int:
    """Reads the number of shared experts, each of the same width as the others."""
    whole = keys.integer(SHARED)
    if width and whole % width:
        keys.fault(SHARED, f"{whole} is not a multiple of moe_intermediate_size {width}, which is not implemented")
        return 1
    return whole // width if width else 0


def _first_dense(keys: Keys) -> int:
    dense = keys.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        keys.fault("mlp_only_layers", f"expected a list of layers, not {dense!r}")
        return 0
    if dense != list(range(len(dense))):
        keys.fault("mlp_only_layers", f"{dense} is not implemented; only the first layers may be dense")
    return len(dense)
