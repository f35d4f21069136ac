"""Mistral (Jiang et al., 2023), Mixtral (Jiang et al., 2024), whose feed-forward layers are experts, and Ministral 3 (2025)."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from forge_models.components.attentions import GQA
from forge_models.components.decoder import DecoderConfig
from forge_models.components.experts import MoEConfig, SoftmaxTopKConfig
from forge_models.hf.config import ABSENT_OR_ZERO, WHOLE, Keys, Same
from forge_models.hf.family import Family, read_base, read_heads, write_base
from forge_models.hf.layers import ExpertNames, read_experts, read_losses, read_window, write_experts, write_losses, write_window

MATRICES: Mapping[str, str] = MappingProxyType({"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"})
"""Our name of a projection of an expert -> its name in Mixtral."""


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
    experts: ClassVar = ExpertNames(part="block_sparse_moe", matrices=MATRICES)

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


BETA, LENGTH = "llama_4_scaling_beta", "original_max_position_embeddings"
"""Entries of the table of angles: strength of the factor on queries, and number of first positions whose factor is 1."""

ANGLES = MappingProxyType(
    {"rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0}
    | {"mscale_all_dim": 1.0, LENGTH: 16384, BETA: 0.1}
)
"""Table of angles if a configuration has none, as in the reference."""


class Ministral3(Family):
    """The Mistral architecture with a factor on queries that grows with their position."""

    model_type = "ministral3"
    architecture = "Ministral3ForCausalLM"
    defaults: ClassVar = {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "sliding_window": None,
    }

    def read(self, keys: Keys) -> dict[str, Any]:
        where = next((name for name in ("rope_scaling", "rope_parameters") if keys.values.get(name)), "rope_parameters")
        table = keys.values.get(where) or dict(ANGLES)
        temperature: dict[str, Any] = {}
        if isinstance(table, dict):
            # The reference never reads the last one.
            keys.values[where] = {name: value for name, value in table.items() if name not in (BETA, "max_position_embeddings")}
            temperature = _read_temperature(keys, where, table)
        fields = read_base(keys) | read_heads(keys)
        return fields | {"attention": GQA(window=read_window(keys), **temperature)}

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        written = write_base(self, decoder) | write_window(decoder)
        attention = decoder.shape.attention
        length = getattr(attention, "temperature_length", None) or decoder.max_length
        table = written["rope_scaling"] or {"rope_type": "default"}
        written["rope_scaling"] = {LENGTH: length, **table, BETA: getattr(attention, "temperature", None) or 0.0}
        return written


def _read_temperature(keys: Keys, where: str, table: dict[str, Any]) -> dict[str, Any]:
    """Reads the factor on queries; a strength of 0 means that there is none."""
    strength, length = table.get(BETA), table.get(LENGTH)
    if type(strength) not in (int, float) or (strength != 0 and keys.positive(f"{where}.{BETA}", strength) is None):
        keys.fault(f"{where}.{BETA}", f"expected a number of 0 or more, not {strength!r}")
        return {}
    if type(length) is not int or not 0 < length < WHOLE:
        keys.fault(f"{where}.{LENGTH}", f"expected a positive integer, not {length!r}")
        return {}
    return {"temperature": float(strength or 0), "temperature_length": length} if strength else {}
