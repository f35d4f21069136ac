"""Builds what a `[data]` table names: tokenizer and sources, checked against each other."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from forge_core.errors import DataError
from forge_core.machine import usable_cores
from forge_core.protocols.data import Source, SourceContext, StatefulIterable, StreamedSource, TextComponent, Tokenizer
from forge_data.loading.spec import LoadSpec
from forge_data.order.phases import labels_of, refuse_faults, source_faults, used
from forge_data.order.source_keys import max_epochs_of, too_long_of, weight_of
from forge_data.store.reader import StoreSource
from forge_data.tokenizers.adapt import adapted

AnySource = Source | StreamedSource


@dataclass(frozen=True)
class OpenedSources:
    """Sources by label, those that no phase ever reads left out, and the tokenizer of the recipe, if it has one.

    Attributes:
        tokenizer: of the recipe, or the copy that a store carries.
        sources: by label.
        weights: before the first phase, one per source.
        places: number of each source in the recipe.
        max_epochs: of each source, or None.
        too_long: of each source, see `too_long_of`.
    """

    tokenizer: Tokenizer | None
    sources: Mapping[str, AnySource]
    weights: tuple[float, ...]
    places: tuple[int, ...]
    max_epochs: tuple[float | None, ...]
    too_long: tuple[str | None, ...]


def context_of(spec: LoadSpec, report: Callable[[str], None], **more: int) -> SourceContext:
    """What sources are built with; trains or loads the tokenizer. `more` are further fields of the context.

    Raises:
        DataError: see the tokenizer.
    """
    data = spec.data
    texts = tuple(
        found
        for source in data.sources
        if isinstance(source, TextComponent) and weight_of(source) > 0 and (found := source.texts()) is not None
    )
    workers = data.workers or usable_cores()
    context = SourceContext(spec.workspace, None, data.sequence_length, report, texts, workers, model=spec.model, **more)
    component: Any = data.tokenizer
    return replace(context, tokenizer=None if component is None else adapted(component.build(context)))


def open_sources(spec: LoadSpec, context: SourceContext) -> OpenedSources:
    """Builds the training sources. One whose weight is 0 in every phase is not even opened.

    Raises:
        DataError: there is none, or one refuses, or tokenizer or vocabulary do not fit.
        ConfigError: labels or weights are faulty.
    """
    data = spec.data
    if not data.sources:
        raise DataError("data.sources is empty; add [[data.sources]] with name = 'stdlib', 'text' or 'store'")
    refuse_faults(source_faults(data))
    labels = labels_of(data)
    places = tuple(place for place, wanted in enumerate(used(data)) if wanted)
    chosen = [data.sources[place] for place in places]
    sources = {labels[place]: build(data.sources[place], labels[place], context, spec.vocab_size) for place in places}
    foreign = [label for label, source in sources.items() if isinstance(source, StatefulIterable)]
    if foreign and len(sources) > 1:
        raise DataError(f"source {foreign[0]!r} is a foreign loader, which cannot be mixed with others; make it the only source")
    refuse_tokenizers(sources)
    return OpenedSources(
        context.tokenizer or _carried(sources),
        sources,
        tuple(map(weight_of, chosen)),
        places,
        tuple(map(max_epochs_of, chosen)),
        tuple(map(too_long_of, chosen)),
    )


def build(component: Any, label: str, context: SourceContext, vocab_size: int | None) -> Any:
    """One source, its ids checked against the model's vocabulary.

    Raises:
        DataError: the source refuses, or holds an id that the model does not have.
    """
    source: Any = component.build(context)
    if isinstance(source, StatefulIterable):
        return source
    largest = getattr(source, "seen_id", None) if source.max_id is None else source.max_id
    if vocab_size is not None and largest is not None and largest >= vocab_size:
        made = f", its tokenizer has {source.vocab_size}" if source.vocab_size else ""
        raise DataError(
            f"source {label!r} ({source.name}) holds token id {largest}, but the model's vocab_size is {vocab_size}{made}; "
            "raise model.vocab_size or prepare the data with another tokenizer"
        )
    return source


def refuse_tokenizers(sources: Mapping[str, Any], expected: Tokenizer | None = None) -> None:
    """Refuses sources that different tokenizers made, as far as they say.

    Args:
        sources: by label.
        expected: what all of them must have been made with, where that is known.

    Raises:
        DataError: naming the tokenizer of each.
    """
    made_with = {label: found for label, source in sources.items() if (found := getattr(source, "tokenizer", None)) is not None}
    if len({*made_with.values(), *([expected.fingerprint] if expected else [])}) > 1:
        listed = ", ".join(f"{label}: {fingerprint[:12]}" for label, fingerprint in made_with.items())
        own = f"; the run's is {expected.fingerprint[:12]}" if expected else ""
        raise DataError(f"sources were made with different tokenizers ({listed}{own}); prepare them with the same one")


def _carried(sources: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer of the first store that carries one."""
    from forge_data.tokenizers.stored import tokenizer_of

    stores = (source for source in sources.values() if isinstance(source, StoreSource))
    return next((tokenizer for store in stores if (tokenizer := tokenizer_of(store)) is not None), None)
