"""Keys of a `config.json` without effect on what a model computes, each with the values under which that holds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Same:
    """The value of another key: an older or foreign name for it, given in addition."""

    key: str


class Anything:
    """Every value."""


ANY = (Anything(),)
OFF = (None, False)
NONE = (None, 0)

Allowed = tuple[Any, ...]
"""Values of a key, `Same`, or `ANY`."""

_BOOKKEEPING = (
    *("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "model_type", "architectures"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id"),
    *("output_attentions", "output_hidden_states", "return_dict", "return_dict_in_generate", "output_scores"),
    *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params", "tokenizer_class"),
    *("torchscript", "use_bfloat16", "tf_legacy_loss", "prefix", "name_or_path", "_commit_hash", "auto_map"),
    *("_attn_implementation", "attn_implementation", "_attn_implementation_autoset", "cache_implementation"),
    *("_flash_attn_2_enabled", "transformers.js_config", "unsloth_fixed", "unsloth_version"),
    *("neftune_noise_alpha", "max_sequence_length", "model_max_length", "tokenizer_model_max_length"),
    *("tokenizer_padding_side", "use_reentrant_checkpointing", "gradient_checkpointing"),
    # old versions kept settings of generation here
    *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty"),
    *("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size"),
    *("encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "forced_bos_token_id"),
    *("forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens"),
    "begin_suppress_tokens",
)
"""Names, versions, token ids, settings of training, serving and generation. Code that `auto_map` names is never run: the
reference has these families itself and does not run it either unless told to."""

COMMON: Mapping[str, Allowed] = MappingProxyType(
    {
        **dict.fromkeys(_BOOKKEEPING, ANY),
        "attention_dropout": NONE,
        "hidden_dropout": NONE,
        "quantization_config": (None,),
        "chunk_size_feed_forward": NONE,
        "is_encoder_decoder": OFF,
        "is_decoder": (None, False, True),
        "add_cross_attention": OFF,
        "cross_attention_hidden_size": (None,),
        "tie_encoder_decoder": OFF,
        "pruned_heads": (None, {}),
        "partial_rotary_factor": (None, 1),
        "rope_interleaved": OFF,
        "use_bidirectional_attention": OFF,
        "use_mrope": OFF,
        "qk_layernorm": OFF,
        "qk_layer_norms": OFF,
        "use_parallel_residual": OFF,
        "pretraining_tp": (None, 1),
    }
)
"""What every family may ignore: bookkeeping, and things that are not implemented where their value says "not used"."""

HINTS: Mapping[str, str] = MappingProxyType(
    {
        "quantization_config": "save the weights in bf16 without it, with the tool that quantized them "
        "(for DeepSeek-V3, inference/fp8_cast_bf16.py of its repository), then remove the key"
    }
)
"""What to do about a key that is refused."""


def equal(one: Any, other: Any) -> bool:
    """Equality that tells true from 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def accepts(allowed: Allowed, value: Any, resolved: Callable[[str], Any]) -> bool:
    """Whether `value` is among the allowed ones; `resolved` gives the value that another key has or defaults to."""
    return any(
        isinstance(entry, Anything) or equal(value, resolved(entry.key) if isinstance(entry, Same) else entry)
        for entry in allowed
    )
