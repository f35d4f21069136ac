"""Builds what a `[data]` table names: tokenizer and sources, checked against each other."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_core.errors import DataError
from forge_core.protocols.data import Source, SourceContext, TextComponent, Tokenizer
from forge_data.components.section import Data
from forge_data.sources.store import StoreSource


@dataclass(frozen=True)
class Opened:
    """Sources by label, their weights, and the tokenizer of the recipe, if it has one."""

    tokenizer: Tokenizer | None
    sources: Mapping[str, Source]
    weights: tuple[float, ...]


def context_of(data: Data, workspace: Path, report: Callable[[str], None]) -> SourceContext:
    """What sources are built with; trains or loads the tokenizer.

    Raises:
        DataError: see the tokenizer.
    """
    texts = tuple(
        source.texts() for source in data.sources if isinstance(source, TextComponent) and getattr(source, "weight", 1.0) > 0
    )
    workers = data.workers or os.cpu_count() or 1
    context = SourceContext(workspace, None, data.sequence_length, report, texts, workers)
    component: Any = data.tokenizer
    tokenizer = None if component is None else component.build(context)
    return SourceContext(workspace, tokenizer, data.sequence_length, report, texts, workers)


def open_sources(data: Data, context: SourceContext, vocab_size: int | None) -> Opened:
    """Builds the training sources. One with weight 0 is not even opened.

    Raises:
        DataError: there is none, or one refuses, or tokenizer or vocabulary do not fit.
    """
    if not data.sources:
        raise DataError("the recipe has no data; add [[data.sources]] with name = 'stdlib', 'text' or 'store'")
    sources: dict[str, Source] = {}
    weights: list[float] = []
    for index, component in enumerate(data.sources):
        label = getattr(component, "label", None) or type(component).__name__.lower()
        if label in sources:
            label = f"{label}-{index + 1}"
        if label in sources:
            raise DataError(f"two sources have the label {label!r}; give each its own `label`")
        weight = float(getattr(component, "weight", 1.0))
        if weight:
            sources[label] = build(component, label, context, vocab_size)
            weights.append(weight)
    if not sources:
        raise DataError("every source has weight 0; set the weight of at least one of [[data.sources]]")
    made_with = {label: source.tokenizer for label, source in sources.items() if source.tokenizer is not None}
    if len(set(made_with.values())) > 1:
        listed = ", ".join(f"{label}: {fingerprint[:12]}" for label, fingerprint in made_with.items())
        raise DataError(f"sources were made with different tokenizers ({listed}); prepare them with the same one")
    return Opened(context.tokenizer or _carried(sources), sources, tuple(weights))


def build(component: Any, label: str, context: SourceContext, vocab_size: int | None) -> Source:
    """One source, its ids checked against the model's vocabulary.

    Raises:
        DataError: the source refuses, or holds an id that the model does not have.
    """
    source: Source = component.build(context)
    if vocab_size is not None and source.max_id is not None and source.max_id >= vocab_size:
        made = f", its tokenizer has {source.vocab_size}" if source.vocab_size else ""
        raise DataError(
            f"source {label!r} ({source.name}) holds token id {source.max_id}, but the model's vocab_size is {vocab_size}{made}; "
            "raise model.vocab_size or prepare the data with another tokenizer"
        )
    return source


def _carried(sources: Mapping[str, Source]) -> Tokenizer | None:
    """The tokenizer of the first store that has a copy of its own."""
    from forge_data.tokenizers.stored import tokenizer_of

    stores = (source for source in sources.values() if isinstance(source, StoreSource))
    return next((tokenizer for store in stores if (tokenizer := tokenizer_of(store)) is not None), None)
