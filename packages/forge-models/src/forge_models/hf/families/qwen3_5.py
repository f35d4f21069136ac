"""Text models of Qwen3.5 (2026), dense and with experts: the layers of Qwen3-Next, other names of the recurrent ones.

The rotary positions of text are those of Qwen3-Next: the sections of `mrope_section` differ in images only. MTP modules do not
affect logits and are not read.
"""

from dataclasses import replace
from typing import Any, ClassVar

from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig, SoftmaxTopKConfig
from forge_models.components.recurrent import Hybrid
from forge_models.hf.config import Keys
from forge_models.hf.families.qwen import SHARED, Qwen3Next, read_shared
from forge_models.hf.family import Family, read_base, read_biases, read_heads, write_base
from forge_models.hf.layers import ExpertNames, read_experts, read_losses, write_experts, write_losses
from forge_models.hf.recurrent import joined_places, read_delta_net, read_kinds, write_kinds
from forge_models.hf.rope import PARTIAL

SECTIONS = ("mrope_section", "mrope_interleaved")
"""Keys of a rope table that say which dimensions of a head rotate by rows and columns of an image."""


class Qwen35(Family):
    model_type = "qwen3_5_text"
    architecture = "Qwen3_5ForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": 4,
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
    }
    ignores: ClassVar = {"attn_output_gate": (True,), "mamba_ssm_dtype": ("float32",)}  # what the reference does anyway
    recurrent: ClassVar = "linear_attn"
    recurrent_places: ClassVar = staticmethod(joined_places)
    mtp_modules: ClassVar = Qwen3Next.mtp_modules

    def read(self, keys: Keys) -> dict[str, Any]:
        fields = read_base(keys, partial=0.25, inert=SECTIONS) | read_heads(keys)
        fields["norm"] = replace(fields["norm"], offset=1)
        full = GQA(**read_biases(keys), qk_norm="head", output_gate=True)
        return fields | {"attention": keys.make(Hybrid, **read_kinds(keys, 4), recurrent=read_delta_net(keys), full=full)}

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        full = getattr(decoder.shape.attention, "full", None)
        written = write_base(self, decoder) | {PARTIAL: decoder.rope.partial} | write_kinds(decoder)
        return written | {"attention_bias": getattr(full, "output_bias", False)}


class Qwen35Moe(Qwen35):
    """Experts and gated shared experts in every layer; the weights of the chosen experts add up to 1."""

    model_type = "qwen3_5_moe_text"
    architecture = "Qwen3_5MoeForCausalLM"
    defaults: ClassVar = {
        **Qwen35.defaults,
        "num_key_value_heads": 2,
        "num_experts": 256,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        SHARED: 512,
    }
    experts: ClassVar = ExpertNames(shared="shared_expert", shared_gate="shared_expert_gate.weight")

    def read(self, keys: Keys) -> dict[str, Any]:
        width = keys.integer("moe_intermediate_size")
        if not keys.given("intermediate_size"):  # no layer is dense
            keys.values["intermediate_size"] = width
        fields = super().read(keys)
        moe = keys.make(
            MoEConfig,
            **read_experts(keys, "num_experts", "num_local_experts"),
            ffn_dim=width,
            shared=read_shared(keys, width),
            shared_gate=True,
            router=SoftmaxTopKConfig(normalize=True),
            losses=read_losses(keys),
        )
        return fields | {"moe": moe}

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        written = super().write(decoder)
        if (moe := decoder.shape.moe) is None:
            return written
        written |= write_experts(moe, "num_experts") | write_losses(moe) | {"moe_intermediate_size": moe.ffn_dim}
        return written | {SHARED: moe.shared * moe.ffn_dim}
