"""What a `[data]` table names, opened and checked: the tokenizer, the sources, and the packing of each source."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from forge_core.errors import DataError
from forge_core.machine import usable_cores
from forge_core.protocols.data import (
    Source,
    SourceContext,
    SourceWithItems,
    StatefulIterable,
    StreamedSource,
    TextComponent,
    Tokenizer,
)
from forge_data.order.phases import (
    PhaseInterval,
    labels_of,
    max_epochs_of,
    refuse_faults,
    source_faults,
    too_long_of,
    used_sources,
    weight_of,
)
from forge_data.packing.concatenation import ConcatenatedPacking, Packing, refuse_short
from forge_data.packing.plan import planned
from forge_data.packing.readers import StreamPacking
from forge_data.section import Data
from forge_data.sources.store import StoreSource
from forge_data.tokenizers.control import adapted

Marks = Literal["documents", "mask", "none"]
"""What rows have besides tokens and labels: documents and positions, which tell padding too; a mask of padding; or nothing."""
AnySource = Source | StreamedSource
Report = Callable[[str], None]


@dataclass(frozen=True)
class LoadSpec:
    """Plain data: equal specs and equal sources give equal rows in every process.

    Attributes:
        data: the recipe's `[data]` table.
        workspace: directory of prepared data.
        seed: of the order of samples.
        global_batch: rows per optimizer step over all ranks.
        vocab_size: of the model; a larger token id is refused. None: not known.
        model: the model component, for sources that prepare what it takes besides tokens.
    """

    data: Data
    workspace: Path
    seed: int = 0
    global_batch: int = 1
    vocab_size: int | None = None
    model: Any = None

    @property
    def marks(self) -> Marks:
        """How training rows mark padding. Where documents are ignored, only packings that keep them whole have padding."""
        return "documents" if self.masked else "none" if self.data.packing == "concatenate" else "mask"

    @property
    def masked(self) -> bool:
        """Whether rows come with positions and documents."""
        return self.data.documents == "mask"


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


def open_sources(spec: LoadSpec, context: SourceContext) -> OpenedSources:
    """Builds the training sources. One whose weight is 0 in every phase is not even opened.

    Raises:
        DataError: there is no source, a source refuses its keys, or tokenizer or vocabulary do not fit.
        ConfigError: labels or weights are faulty.
    """
    data = spec.data
    if not data.sources:
        raise DataError("data.sources is empty; add [[data.sources]] with name = 'stdlib', 'text' or 'store'")
    refuse_faults(source_faults(data))
    labels = labels_of(data)
    places = tuple(place for place, wanted in enumerate(used_sources(data)) if wanted)
    chosen = [data.sources[place] for place in places]
    sources = {labels[place]: build_source(data.sources[place], labels[place], context, spec.vocab_size) for place in places}
    foreign = [label for label, source in sources.items() if isinstance(source, StatefulIterable)]
    if foreign and len(sources) > 1:
        raise DataError(f"source {foreign[0]!r} is a foreign loader, which cannot be mixed with others; make it the only source")
    refuse_tokenizers(sources)
    return OpenedSources(
        context.tokenizer or _carried_tokenizer(sources),
        sources,
        tuple(map(weight_of, chosen)),
        places,
        tuple(map(max_epochs_of, chosen)),
        tuple(map(too_long_of, chosen)),
    )


def silent(message: str) -> None:
    """Takes a message and does nothing with it; the default of `report`."""


def context_of(spec: LoadSpec, report: Report, **more: int) -> SourceContext:
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


def build_source(component: Any, label: str, context: SourceContext, vocab_size: int | None) -> Any:
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


def _carried_tokenizer(sources: Mapping[str, Any]) -> Tokenizer | None:
    """The tokenizer of the first store that carries one."""
    from forge_data.tokenizers.dump import tokenizer_of

    stores = (source for source in sources.values() if isinstance(source, StoreSource))
    return next((tokenizer for store in stores if (tokenizer := tokenizer_of(store)) is not None), None)


def open_packings(
    spec: LoadSpec, opened: OpenedSources, intervals: Sequence[PhaseInterval], report: Report
) -> list[Packing | StreamPacking]:
    """The packings of the training sources, in rows of the longest length of the run.

    Raises:
        DataError: a source has no full row, or the recipe asks of a stream what only a store can give.
    """
    data, unit = spec.data, max(interval.length for interval in intervals)
    if any(isinstance(source, StreamedSource) for source in opened.sources.values()):
        _refuse_counting(spec, opened)
    found: list[Packing | StreamPacking] = []
    for (label, source), too_long in zip(opened.sources.items(), opened.too_long, strict=True):
        if isinstance(source, StreamedSource):
            _refuse_too_long(label, too_long)
            seed, shuffle = f"{spec.seed}/{label}", data.shuffle != "none"
            found.append(StreamPacking(source, data.readers, unit, seed, data.shuffle_buffer, shuffle))
            continue
        if data.packing == "concatenate":
            refuse_short(source, label, unit)
        found.append(open_packing(spec, label, source, unit, report, too_long))
    return found


def open_packing(spec: LoadSpec, label: str, source: Source, length: int, report: Report, too_long: str | None = None) -> Packing:
    """Rows of `length` tokens of one source, as the recipe packs them; a pack plan is made once and kept in the workspace.

    `too_long` is that of the source. One with items has dealt with its long documents when it was prepared.
    """
    if spec.data.packing == "concatenate":
        if isinstance(source, SourceWithItems):
            raise DataError(
                f"documents of source {label!r} ({source.name}) have {source.extras[0]}, and packing = 'concatenate' would cut "
                "them; set data.packing = 'best_fit', or 'pad'"
            )
        _refuse_too_long(label, too_long)
        return ConcatenatedPacking(source, length)
    too_long = None if isinstance(source, SourceWithItems) else too_long
    made = planned(source, length, spec.data.packing, spec.workspace, label, spec.data.items_per_row, too_long)
    found = made.summary
    report(
        f"packed {label}: {found['documents']:,} documents in {found['rows']:,} rows, {found['efficiency']:.2%} full, "
        + (f"{found['left_out']:,} documents longer than a row were left out" if too_long == "skip" else "")
        + (f"{found['truncated_documents']:,} documents longer than a row were cut" if too_long != "skip" else "")
    )
    return made


def _refuse_too_long(label: str, too_long: str | None) -> None:
    """Refuses `too_long` where every document may be cut.

    Raises:
        DataError: the source of this label sets it.
    """
    if too_long is not None:
        raise DataError(
            f"source {label!r}: too_long = {too_long!r} has no effect with packing = 'concatenate', which cuts documents at the "
            "end of every row; remove it, or set data.packing = 'best_fit', or 'pad'"
        )


def _refuse_counting(spec: LoadSpec, opened: OpenedSources) -> None:
    """The length of a stream is unknown, and so are its documents before they are read."""
    data = spec.data
    streams = [label for label, source in opened.sources.items() if isinstance(source, StreamedSource)]
    if data.packing != "concatenate":
        raise DataError(
            f"data.packing = {data.packing!r} needs the lengths of all documents in advance; source {streams[0]!r} is a "
            "stream and does not know them. Use packing = 'concatenate', or prepare the source into a store"
        )
    limited = dict(zip(opened.sources, opened.max_epochs, strict=True))
    if data.epochs is not None or any(limited[label] is not None for label in streams):
        raise DataError(
            f"source {streams[0]!r} is a stream of unknown length, so its epochs cannot be counted; remove "
            "data.epochs and max_epochs and set train.max_steps"
        )
