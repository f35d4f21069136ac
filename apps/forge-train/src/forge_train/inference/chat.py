"""The chat template of stored weights, by which a prompt is a turn of a conversation."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from forge_core.errors import DataError
from forge_core.protocols.data import Tokenizer
from forge_core.protocols.weights import Weights
from forge_train.inference.forge_weights import ForgeWeights

if TYPE_CHECKING:
    from forge_vlm.data.chat import Chat


def chat_for(weights: Weights, coder: Tokenizer, template: str | None = None) -> "Chat":
    """The chat template of weights, with the special tokens of their tokenizer.

    Args:
        weights: a folder with a template, a run that started from one, or a run with conversations in its data.
        coder: their tokenizer.
        template: what to take instead, as recipes name it: a name, a file or a folder.

    Raises:
        DataError: there is none, or there are several.
    """
    from forge_vlm.data.chat import Chat, chat_of

    if template is not None:
        return chat_of(template).knowing(coder.special_tokens)
    if weights.facts.tokenizer is not None:
        return chat_of(str(weights.facts.tokenizer)).knowing(coder.special_tokens)
    kept = weights.meta.get("chat_template") if isinstance(weights, ForgeWeights) else None
    if isinstance(kept, str):
        return Chat(kept).knowing(coder.special_tokens)
    names = _of_the_data(weights)
    if len(names) != 1:
        found = f"several chat templates in its data: {', '.join(names)}" if names else "no chat template"
        raise DataError(f"{weights.facts.origin} has {found}; name one with --template, or leave --chat out")
    return chat_of(names[0]).knowing(coder.special_tokens)


def _of_the_data(weights: Weights) -> list[str]:
    """The templates by which a run's sources wrote conversations."""
    data: Any = weights.facts.recipe.get("data") or {}
    templates = [source.get("template") for source in data.get("sources") or () if isinstance(source, Mapping)]
    return list(dict.fromkeys(name for name in templates if isinstance(name, str) and name != "none"))
