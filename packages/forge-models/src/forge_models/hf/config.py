"""`config.json` with an account of every key: read, known not to matter, or refused by name. No key is dropped."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_core.errors import ConfigError, Fault, ForgeError

INERT = frozenset(
    {
        *("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "model_type", "architectures"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id"),
        *("output_attentions", "output_hidden_states", "return_dict", "return_dict_in_generate", "output_scores"),
        *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params", "tokenizer_class"),
        *("torchscript", "use_bfloat16", "tf_legacy_loss", "prefix", "name_or_path", "_commit_hash"),
        *("_attn_implementation", "attn_implementation", "_attn_implementation_autoset", "cache_implementation"),
        # settings of generation, which old versions kept here
        *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty"),
        *("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size"),
        *("encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "forced_bos_token_id"),
        *("forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens"),
        "begin_suppress_tokens",
    }
)
"""Keys that change no logit of any family: bookkeeping, token ids, settings of generation."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "attention_dropout": (None, 0),
    "pretraining_tp": (None, 1),
    "quantization_config": (None,),
    "chunk_size_feed_forward": (None, 0),
    "is_encoder_decoder": (None, False),
    "is_decoder": (None, False, True),
    "add_cross_attention": (None, False),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (None, False),
    "pruned_heads": (None, {}),
    "partial_rotary_factor": (None, 1),
    "use_bidirectional_attention": (None, False),
    "use_mrope": (None, False),
    "hidden_dropout": (None, 0),
    "qk_layernorm": (None, False),
    "use_parallel_residual": (None, False),
}
"""Keys of things that are not implemented, with the values that mean "not used"."""

CONFIG = "config.json"


class Unsupported(ForgeError):
    """A folder in the Hugging Face format that cannot be read as what it claims to be, or says what Forge does not do."""


class Keys:
    """The keys of one `config.json`; `finish` refuses what nobody asked for.

    A key that is absent has the default of its family, as in the reference implementation.
    """

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> None:
        self.values, self.where = dict(values), where
        self._defaults = defaults
        self._asked: set[str] = set()
        self.faults: list[Fault] = []

    def get(self, key: str) -> Any:
        """The value of a key, the family's default when it is absent; a key without a default is required."""
        self._asked.add(key)
        if key in self.values:
            return self.values[key]
        if key not in self._defaults:
            self.fault(key, "is missing")
            return None
        return self._defaults[key]

    def integer(self, key: str, optional: bool = False) -> int:
        """A positive integer; 0 stands for a fault or, where `optional`, for null."""
        value = self.get(key)
        if value is None and optional:
            return 0
        if type(value) is not int or value < 1:
            self.fault(key, f"expected a positive integer, not {value!r}")
            return 0
        return value

    def whole(self, key: str) -> int:
        """An integer that may be 0."""
        value = self.get(key)
        if type(value) is not int or value < 0:
            self.fault(key, f"expected an integer of 0 or more, not {value!r}")
            return 0
        return value

    def number(self, key: str, optional: bool = False) -> float:
        """A positive number; 0.0 stands for a fault or, where `optional`, for null."""
        value = self.get(key)
        if value is None and optional:
            return 0.0
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            self.fault(key, f"expected a positive number, not {value!r}")
            return 0.0
        return float(value)

    def boolean(self, key: str) -> bool:
        """True or false; null counts as false."""
        value = self.get(key)
        if value is not None and type(value) is not bool:
            self.fault(key, f"expected true or false, not {value!r}")
        return value is True

    def only(self, key: str, *allowed: Any) -> Any:
        """A value that must be one of `allowed`."""
        value = self.get(key)
        if value not in allowed:
            known = " or ".join(json.dumps(entry) for entry in allowed)
            self.fault(key, f"{json.dumps(value)} is not implemented for this family; only {known} is")
        return value

    def fault(self, key: str, message: str) -> None:
        self.faults.append(Fault(key, message, self.where))

    def finish(self) -> None:
        """Refuses what is left.

        Raises:
            ConfigError: all faults, with the name of every key that was not understood.
        """
        for key, value in self.values.items():
            if key in self._asked or key in INERT:
                continue
            if key not in NEUTRAL:
                self.fault(key, f"is not a key that Forge knows for this family, so {_short(value)} is refused")
            elif value not in NEUTRAL[key]:
                self.fault(key, f"{_short(value)} is not implemented")
        if self.faults:
            raise ConfigError(dict.fromkeys(self.faults))


def read_config(folder: Path) -> dict[str, Any]:
    """The content of `config.json`.

    Raises:
        Unsupported: there is none, it is no JSON object, or it names code that would have to be run.
    """
    path = folder / CONFIG
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as cause:
        raise Unsupported(f"{path} cannot be read: {cause.strerror}; give a folder with config.json and safetensors") from cause
    except ValueError as cause:
        raise Unsupported(f"{path} is no JSON: {cause}") from cause
    if not isinstance(values, dict):
        raise Unsupported(f"{path} holds no JSON object")
    if values.get("auto_map"):
        raise Unsupported(f"{path}: auto_map names Python code of its author ({_short(values['auto_map'])}); it is not run")
    return values


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
