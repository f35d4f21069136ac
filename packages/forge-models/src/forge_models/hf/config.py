"""Reads `config.json` and accounts for every key: read, ignored with an allowed value, or refused by name. No key is dropped.

A key may be ignored if it does not affect what the model computes; the tables below list the values for which that is true.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from forge_core.errors import ConfigError, Fault, ForgeError


@dataclass(frozen=True)
class Same:
    """The value of another key, of which this key is an older or foreign name."""

    key: str


class Anything:
    """Any value."""


ANY_VALUE = (Anything(),)
ABSENT_OR_FALSE = (None, False)
ABSENT_OR_ZERO = (None, 0)

Allowed = tuple[Any, ...]
"""Allowed values of a key, `Same`, or `ANY_VALUE`."""

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
    # older versions stored generation settings here
    *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty"),
    *("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size"),
    *("encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "forced_bos_token_id"),
    *("forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens"),
    "begin_suppress_tokens",
)
"""Names, versions, token ids, and settings of training, serving and generation. Code named by `auto_map` is never run;
transformers implements these families itself and does not run such code either by default."""

IGNORED_BY_ALL: Mapping[str, Allowed] = MappingProxyType(
    {
        **dict.fromkeys(_BOOKKEEPING, ANY_VALUE),
        "attention_dropout": ABSENT_OR_ZERO,
        "hidden_dropout": ABSENT_OR_ZERO,
        "quantization_config": (None,),
        "chunk_size_feed_forward": ABSENT_OR_ZERO,
        "is_encoder_decoder": ABSENT_OR_FALSE,
        "is_decoder": (None, False, True),
        "add_cross_attention": ABSENT_OR_FALSE,
        "cross_attention_hidden_size": (None,),
        "tie_encoder_decoder": ABSENT_OR_FALSE,
        "pruned_heads": (None, {}),
        "partial_rotary_factor": (None, 1),
        "rope_interleaved": ABSENT_OR_FALSE,
        "use_bidirectional_attention": ABSENT_OR_FALSE,
        "use_mrope": ABSENT_OR_FALSE,
        "qk_layernorm": ABSENT_OR_FALSE,
        "qk_layer_norms": ABSENT_OR_FALSE,
        "use_parallel_residual": ABSENT_OR_FALSE,
        "pretraining_tp": (None, 1),
    }
)
"""Keys that every family may ignore: bookkeeping, and features that are not implemented, with values that switch them off."""

REFUSAL_HINTS: Mapping[str, str] = MappingProxyType(
    {
        "quantization_config": "save the weights in bf16 without it, with the tool that quantized them "
        "(for DeepSeek-V3, inference/fp8_cast_bf16.py of its repository), then remove the key",
        "expert_dtype": "save the weights in bf16, dequantized by the tools of their origin, then remove the key",
    }
)
"""Key -> what to do if it is refused."""


def same_value(one: Any, other: Any) -> bool:
    """Whether two values are equal, distinguishing true from 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def accepts(allowed: Allowed, value: Any, resolved: Callable[[str], Any]) -> bool:
    """Whether `value` is allowed; `resolved` returns the value or default of another key."""
    return any(
        isinstance(entry, Anything) or same_value(value, resolved(entry.key) if isinstance(entry, Same) else entry)
        for entry in allowed
    )


CONFIG = "config.json"
LARGEST, WHOLE = sys.float_info.max, 2**31
"""Upper bounds of numbers and of integers."""

LEFT_OUT = "if it changes no logit, leave it out by convert --ignore {key} or model.from_hf_ignore"
"""How to ignore a key of a decoder's folder."""

Made = TypeVar("Made")


class Unsupported(ForgeError):
    """A folder in the Hugging Face format is inconsistent or damaged, or needs something that Forge does not implement."""


class Keys:
    """The keys of one `config.json`; `finish` refuses keys that were not read.

    An absent key has the default of its family, as in the reference implementation.

    Args:
        values: content of the file.
        defaults: defaults of the family.
        where: name of the file, for messages.
        ignores: keys without effect in this family, with their allowed values; `IGNORED_BY_ALL` is added.
        ignore: keys that the user ignores: unknown ones, and those of features that are not implemented.
        hint: how to ignore a key.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        defaults: Mapping[str, Any],
        where: str,
        ignores: Mapping[str, Allowed] | None = None,
        ignore: Sequence[str] = (),
        hint: str = LEFT_OUT,
    ) -> None:
        self.values, self.where = dict(values), where
        self._defaults, self._ignores = defaults, {**IGNORED_BY_ALL, **(ignores or {})}
        self._asked: set[str] = set()
        self._settled: dict[str, Any] = {}
        self._wanted, self._ignored = tuple(ignore), set[str]()
        self._refusal: ValueError | None = None
        self._hint = hint
        self.faults: list[Fault] = []

    def given(self, key: str) -> bool:
        """Whether the file has a key, which is then marked as read."""
        self._asked.add(key)
        return key in self.values

    def known(self, key: str) -> bool:
        """Whether the family has a default for a key, so that it may be absent."""
        return key in self._defaults

    def settle(self, key: str, value: Any) -> None:
        """Sets the effective value of a key that may be given in several places, with which repetitions are compared."""
        self._settled[key] = value

    def ignored(self, key: str) -> bool:
        """Whether the user ignores a key, or an entry `table.key`, that is not understood."""
        if key in self._wanted:
            self._ignored.add(key)
        return key in self._wanted

    def get(self, key: str) -> Any:
        """Returns the value of a key, or the family's default if it is absent; a key without a default is required."""
        self._asked.add(key)
        if key in self.values:
            return self.values[key]
        if key not in self._defaults:
            self.fault(key, "is missing")
            return None
        return self._defaults[key]

    def integer(self, key: str, optional: bool = False) -> int:
        """Returns a positive integer; 0 after a fault or, if `optional`, for null."""
        value = self.get(key)
        if value is None and optional:
            return 0
        if type(value) is not int or not 0 < value < WHOLE:
            self.fault(key, f"expected a positive integer, not {value!r}")
            return 0
        return value

    def whole(self, key: str) -> int:
        """Returns an integer that may be 0."""
        value = self.get(key)
        if type(value) is not int or not 0 <= value < WHOLE:
            self.fault(key, f"expected an integer of 0 or more, not {value!r}")
            return 0
        return value

    def number(self, key: str, optional: bool = False) -> float:
        """Returns a positive number; 0.0 after a fault or, if `optional`, for null."""
        value = self.get(key)
        return 0.0 if value is None and optional else self.positive(key, value) or 0.0

    def positive(self, key: str, value: Any) -> float | None:
        """Returns `value` as a float; None if it is not a positive number, which is a fault of `key`."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST:
            self.fault(key, f"expected a positive number, not {value!r}")
            return None
        return float(value)

    def not_negative(self, key: str) -> float:
        """Returns a number that may be 0."""
        value = self.get(key)
        return 0.0 if same_value(value, 0) else self.positive(key, value) or 0.0

    def boolean(self, key: str) -> bool:
        """Returns a boolean; False for null."""
        value = self.get(key)
        if value is not None and type(value) is not bool:
            self.fault(key, f"expected true or false, not {value!r}")
        return value is True

    def only(self, key: str, *allowed: Any) -> Any:
        """Returns a value that must be one of `allowed`."""
        value = self.get(key)
        if not any(same_value(value, entry) for entry in allowed):
            known = " or ".join(json.dumps(entry) for entry in allowed)
            self.fault(key, f"{json.dumps(value)} is not implemented for this family; only {known} is")
        return value

    def make(self, kind: Callable[..., Made], **fields: Any) -> Made | None:
        """Returns `kind(**fields)`; None if there are faults, or if `kind` refuses the fields, which `finish` then reports."""
        if self.faults or self._refusal:
            return None
        try:
            return kind(**fields)
        except ValueError as cause:
            self._refusal = cause
            return None

    def fault(self, key: str, message: str) -> None:
        self.faults.append(Fault(key, message, self.where))

    def finish(self) -> None:
        """Refuses keys that were not read.

        Raises:
            ConfigError: all faults, with the name of every key that is not understood.
            Unsupported: values are valid, but not in combination.
        """
        for key, value in self.values.items():
            if key in self._asked or self.ignored(key) or accepts(self._ignores.get(key, ()), value, self._resolved):
                continue
            message = "is not implemented" if key in self._ignores else "is not known for this family"
            hint = REFUSAL_HINTS.get(key, self._hint.format(key=key))
            self.faults.append(Fault(key, f"{_short(value)} {message}", self.where, hint))
        for key in self._wanted:
            if key in self._asked:
                self.fault(key, "determines what the model computes, so it cannot be ignored; change the file instead")
            elif key not in self._ignored:
                self.fault(key, "cannot be ignored, because the file has no such key; remove it from the ignored keys")
        if self.faults:
            raise ConfigError(dict.fromkeys(self.faults))
        if self._refusal:
            raise Unsupported(f"{self.where}: {self._refusal}") from self._refusal

    def _resolved(self, key: str) -> Any:
        return self._settled.get(key, self.values.get(key, self._defaults.get(key)))


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the content of `config.json`.

    Raises:
        Unsupported: the file is missing, or is not a JSON object.
    """
    path = folder / CONFIG
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as cause:
        raise Unsupported(f"{path} cannot be read: {cause.strerror}; give a folder with config.json and safetensors") from cause
    except ValueError as cause:
        raise Unsupported(f"{path} is not valid JSON: {cause}") from cause
    if not isinstance(values, dict):
        raise Unsupported(f"{path} is not a JSON object")
    return values


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
