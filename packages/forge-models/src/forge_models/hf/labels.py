"""Classifiers in `config.json`: the class `*ForSequenceClassification` of a family, and the names of its labels.

transformers computes the logits of labels with `score`, without soft cap or factor, and takes those of the last token that is not
`pad_token_id`.
"""

from collections.abc import Mapping
from typing import Any

from forge_models.hf.config import Unsupported

SCORE = "score.weight"
"""Name of the head of a classifier."""
WITHOUT = frozenset(
    {"granite", "olmoe", "glm4_moe", "olmo_hybrid", "cohere", "cohere2", "minimax_m2", "qwen3_5_moe_text", "deepseek_v32"}
    | {"nemotron_h", "gemma4_text", "kimi_linear", "llama4_text", "deepseek_v4"}
)
"""Families without such a class in transformers."""
NAMED = {
    "gemma3_text": "Gemma3TextForSequenceClassification",
    "gpt2": "GPT2ForSequenceClassification",
    "qwen3_5_text": "Qwen3_5TextForSequenceClassification",
}
"""Classes whose names do not follow from that of the language model."""
KEYS = ("id2label", "label2id", "num_labels", "problem_type", "classifier_dropout")
SINGLE = "single_label_classification"


def classifier_of(model_type: str, architecture: str) -> str | None:
    """Returns the class of a family's classifier; None if there is none."""
    if model_type in WITHOUT:
        return None
    return NAMED.get(model_type, architecture.replace("ForCausalLM", "ForSequenceClassification"))


def unnamed(count: int) -> tuple[str, ...]:
    """Returns the names that transformers gives to labels without names."""
    return tuple(f"LABEL_{number}" for number in range(count))


def labels_in(values: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Returns the names of the labels of a classifier's configuration.

    Raises:
        Unsupported: they are not names, or the classifier is one of several labels at a time, or of a number.
    """
    if (kind := values.get("problem_type")) not in (None, SINGLE):
        raise Unsupported(f"{where}: problem_type {kind!r} is not implemented; only classifiers of one label for each text are")
    names = values.get("id2label")
    if names is None:
        count = values.get("num_labels", 2)
        found = unnamed(count) if isinstance(count, int) else ()
    else:
        by_number = {str(number): name for number, name in names.items()} if isinstance(names, dict) else {}
        found = tuple(by_number.get(str(number)) for number in range(len(by_number)))
    if len(found) < 2 or any(not isinstance(name, str) or not name for name in found) or len(set(found)) < len(found):
        raise Unsupported(f"{where}: id2label must give at least two labels different names, by their numbers from 0 on")
    return found  # type: ignore[return-value]  # all are names


def keys_of(labels: tuple[str, ...]) -> dict[str, Any]:
    """Returns the keys of `config.json` for labels."""
    return {
        "id2label": {str(number): name for number, name in enumerate(labels)},
        "label2id": {name: number for number, name in enumerate(labels)},
        "problem_type": SINGLE,
    }
