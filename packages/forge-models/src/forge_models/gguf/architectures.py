"""Architectures of GGUF files: converts between their metadata and the keys of a `config.json`.

The programs that read a GGUF file compute some settings from others or have them in their code, such as the scale of attention in
Gemma. `read` returns what they compute. So a model is written only if reading its metadata back returns the same model.
"""

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from forge_models.components.decoder import DecoderConfig
from forge_models.hf.config import Unsupported
from forge_models.hf.families import FAMILIES
from forge_models.hf.family import config_of, decoder_of
from forge_models.hf.rope import PARTIAL

HEAD = "output.weight"
"""Tensor that a model with tied embeddings does not have."""
FACTORS = "rope_freqs.weight"
"""Tensor of the divisors of frequencies, for the scaling `llama3`."""
LLAMA3 = "forge.llama3."
"""Beginning of the keys of `LLAMA3_SETTINGS`. Only Forge reads them; other programs read `FACTORS`, and would apply a factor
under its usual key once more."""
LLAMA3_SETTINGS = ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
YARN = {
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
}
"""Settings of the scaling `yarn`, and their keys."""


class Architecture:
    """One architecture: the names of its settings, and what its readers derive.

    Attributes:
        name: `general.architecture`.
        family: family that describes the models of a file.
        eps: key of the `eps` of norms, in metadata and in `config.json`.
        scalings: scalings of rotary positions that readers apply.
        interleaved: whether readers rotate neighboring dimensions of q and k, so that their rows have another order.
        norm_offset: number that files add to the weights of norms.
        keys: further keys of metadata, and those of `config.json`.
    """

    name: ClassVar[str]
    family: ClassVar[str]
    eps: ClassVar[tuple[str, str]] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    scalings: ClassVar[tuple[str, ...]] = ("linear", "yarn")
    interleaved: ClassVar[bool] = False
    norm_offset: ClassVar[float] = 0.0
    keys: ClassVar[Mapping[str, str]] = {}

    def _keys(self) -> dict[str, str]:
        return {
            "context_length": "max_position_embeddings",
            "embedding_length": "hidden_size",
            "block_count": "num_hidden_layers",
            "feed_forward_length": "intermediate_size",
            "attention.head_count": "num_attention_heads",
            "attention.head_count_kv": "num_key_value_heads",
            self.eps[0]: self.eps[1],
            "rope.freq_base": "rope_theta",
            "vocab_size": "vocab_size",
            **self.keys,
        }

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        """Returns the metadata of a model, without the name of the architecture before each key."""
        config = config_of(FAMILIES[self.family], decoder)
        width = decoder.shape.head_dim
        found = {ours: config[theirs] for ours, theirs in self._keys().items() if config.get(theirs) is not None}
        found |= {"attention.key_length": width, "attention.value_length": width}
        found["rope.dimension_count"] = int(width * decoder.rope.partial)
        scaling = config["rope_scaling"] or {}
        kind = scaling.get("rope_type")
        if kind == "linear":
            found |= {"rope.scaling.type": "linear", "rope.scaling.factor": scaling["factor"]}
        elif kind == "yarn":
            found |= {"rope.scaling.type": "yarn"} | {key: scaling[name] for name, key in YARN.items()}
        elif kind == "llama3":
            found |= {LLAMA3 + name: scaling[name] for name in LLAMA3_SETTINGS}
        return found

    def read(self, metadata: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
        """Returns the keys of `config.json` from metadata without the name of the architecture, and the names of tensors.

        Raises:
            Unsupported: a key is missing.
        """
        optional = {*self.keys, "attention.head_count_kv", "rope.freq_base", "vocab_size"}
        if missing := sorted(set(self._keys()) - optional - set(metadata)):
            raise Unsupported(f"metadata without {', '.join(f'{self.name}.{key}' for key in missing)}; the file is not complete")
        config = {theirs: metadata[ours] for ours, theirs in self._keys().items() if ours in metadata}
        config |= {"model_type": self.family, "tie_word_embeddings": HEAD not in tensors}
        heads, dim = config["num_attention_heads"], config["hidden_size"]
        width = metadata.get("attention.key_length", dim // heads)
        rotated = metadata.get("rope.dimension_count", width)
        defaults = FAMILIES[self.family].defaults
        if "head_dim" in defaults:
            config["head_dim"] = width
        elif width * heads != dim:
            raise Unsupported(f"heads of {width} dimensions are not implemented for {self.name}")
        if self.partial:
            config[PARTIAL] = rotated / width
        elif rotated != width:
            raise Unsupported(f"{self.name}.rope.dimension_count {rotated} is not implemented; only {width} is")
        return config | {"rope_scaling": self._scaling(metadata, tensors)}

    partial: ClassVar[bool] = False
    """Whether the family rotates a part of each head."""

    def _scaling(self, metadata: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any] | None:
        kind = metadata.get("rope.scaling.type", "none")
        if FACTORS in tensors:
            if any(LLAMA3 + name not in metadata for name in LLAMA3_SETTINGS):
                raise Unsupported(
                    f"{FACTORS} without the settings that Forge writes; read the model's Hugging Face folder instead"
                )
            kind = "llama3"
        if kind == "none":
            return None
        if kind not in self.scalings:
            raise Unsupported(
                f"{self.name} with scaling {kind!r} is not implemented; known: {', '.join(self.scalings) or 'none'}"
            )
        if kind == "linear":
            return {"rope_type": kind, "factor": metadata["rope.scaling.factor"]}
        if kind == "llama3":
            return {"rope_type": kind} | {name: metadata[LLAMA3 + name] for name in LLAMA3_SETTINGS}
        return {"rope_type": kind} | {name: metadata[key] for name, key in YARN.items() if key in metadata}


class LlamaGguf(Architecture):
    """Llama, and models with the same formulas, such as Mistral without windows."""

    name = "llama"
    family = "llama"
    scalings: ClassVar = ("linear", "yarn", "llama3")
    interleaved = True

    def read(self, metadata: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
        if "expert_count" in metadata:
            raise Unsupported(
                "architecture 'llama' with experts (Mixtral) is not implemented; read its Hugging Face folder instead"
            )
        biases = {"attention_bias": "blk.0.attn_output.bias", "mlp_bias": "blk.0.ffn_down.bias"}
        return super().read(metadata, tensors) | {key: name in tensors for key, name in biases.items()}


class Qwen2Gguf(Architecture):
    """Qwen2 and 2.5, without windows."""

    name = "qwen2"
    family = "qwen2"


class Qwen3Gguf(Architecture):
    """Dense Qwen3, without windows and biases."""

    name = "qwen3"
    family = "qwen3"


class Qwen3MoeGguf(Architecture):
    """Qwen3 with experts in every layer, whose weights are divided by their sum."""

    name = "qwen3moe"
    family = "qwen3_moe"
    keys: ClassVar = {
        "expert_count": "num_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
    }

    def read(self, metadata: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
        return super().read(metadata, tensors) | {"norm_topk_prob": True}


class Gemma2Gguf(Architecture):
    """Gemma-2: the largest model has a scale of its own."""

    name = "gemma2"
    family = "gemma2"
    scalings: ClassVar = ()
    norm_offset = 1.0
    largest: ClassVar[int] = 46
    keys: ClassVar = {
        "attention.sliding_window": "sliding_window",
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    }

    def read(self, metadata: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
        config = super().read(metadata, tensors)
        absent = {theirs: None for theirs in self.keys.values() if theirs not in config and theirs != "sliding_window"}
        per_head = config["hidden_size"] // config["num_attention_heads"]
        config["query_pre_attn_scalar"] = per_head if config["num_hidden_layers"] == self.largest else config["head_dim"]
        return config | absent


class Gemma3Gguf(Gemma2Gguf):
    """The text part of Gemma-3."""

    name = "gemma3"
    family = "gemma3_text"
    scalings: ClassVar = ("linear",)
    largest = 62
    keys: ClassVar = {"attention.sliding_window": "sliding_window", "rope.freq_base_swa": "rope_local_base_freq"}

    def read(self, metadata: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
        return {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0} | super().read(metadata, tensors)


class StableLMGguf(Architecture):
    """StableLM 3B and 2."""

    name = "stablelm"
    family = "stablelm"
    eps: ClassVar = ("attention.layer_norm_epsilon", "layer_norm_eps")
    scalings: ClassVar = ()
    partial = True

    def write(self, decoder: DecoderConfig) -> dict[str, Any]:
        return super().write(decoder) | {"use_parallel_residual": False}

    def read(self, metadata: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
        if metadata.get("use_parallel_residual"):
            raise Unsupported("stablelm.use_parallel_residual is not implemented")
        return super().read(metadata, tensors) | {"use_qkv_bias": "blk.0.attn_q.bias" in tensors}


class Phi3Gguf(Architecture):
    """Phi-3 and 4, without windows, which llama.cpp does not apply to them."""

    name = "phi3"
    family = "phi3"
    scalings: ClassVar = ()
    partial = True


ARCHITECTURES: Mapping[str, Architecture] = {
    one.name: one
    for one in (
        *(LlamaGguf(), Qwen2Gguf(), Qwen3Gguf(), Qwen3MoeGguf()),
        *(Gemma2Gguf(), Gemma3Gguf(), StableLMGguf(), Phi3Gguf()),
    )
}
"""Architectures by name, in the order in which they are tried."""


def decoder_in(architecture: Architecture, metadata: Mapping[str, Any], tensors: Collection[str], where: str) -> DecoderConfig:
    """Returns the decoder that metadata and the names of tensors describe; `where` names the file in messages.

    Raises:
        ConfigError, Unsupported: a setting is missing or not implemented.
    """
    family = FAMILIES[architecture.family]
    try:
        config = architecture.read(metadata, tensors)
    except Unsupported as cause:
        raise Unsupported(f"{where}: {cause}") from cause
    return decoder_of(family, config, where)


def stored_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Returns metadata as it is read from a file, where a real number has 32 bits: the shortest decimal number for them."""
    return {key: shortest(value) if isinstance(value, float) else value for key, value in metadata.items()}


def shortest(value: float) -> float:
    """Returns the shortest decimal number that has the same 32 bits as `value`."""
    import numpy as np

    return float(str(np.float32(value)))
