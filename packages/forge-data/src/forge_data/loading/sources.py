"""Opens and checks the components of `[data]`: the tokenizer, the sources, and the packing of each source."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from forge_core.errors import DataError
from forge_core.machine import usable_cores
from forge_core.protocols.data import (
    Source,
    SourceContext,
    SourceWithItems,
    SourceWithMask,
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
"""Arrays of rows besides tokens and labels: documents and positions, which also mark padding; a padding mask; or nothing."""
AnySource = Source | StreamedSource
Report = Callable[[str], None]


@dataclass(frozen=True)
class LoadSpec:
    """Settings that determine the rows of a run: with equal specs and sources, every process reads equal rows.

    Attributes:
        data: the recipe's `[data]` table.
        workspace: directory of prepared data.
        seed: seed of the sample order.
        global_batch: rows per optimizer step over all ranks.
        vocab_size: vocabulary size of the model, which limits token ids; None if unknown.
        model: the model component, for sources that prepare further inputs of it.
        pairs: whether the objective compares preference pairs, which all sources must have then, and none otherwise; None:
            sources may have them, as for a look at the rows.
    """

    data: Data
    workspace: Path
    seed: int = 0
    global_batch: int = 1
    vocab_size: int | None = None
    model: Any = None
    pairs: bool | None = False

    @cached_property
    def marks(self) -> Marks:
        """Marks of training rows. If documents are ignored, only packings that keep documents whole need a padding mask."""
        return "documents" if self.masked else "none" if self.data.packing == "concatenate" else "mask"

    @cached_property
    def masked(self) -> bool:
        """Whether rows have positions and documents."""
        return self.data.documents == "mask"


@dataclass(frozen=True)
class OpenedSources:
    """The opened training sources, without those that no phase reads, and the tokenizer.

    Attributes:
        tokenizer: tokenizer of the recipe, or the copy in a store, or None.
        sources: sources by label.
        weights: weight of each source before the first phase.
        places: index of each source in `data.sources`.
        max_epochs: `max_epochs` of each source, or None.
        too_long: `too_long` of each source; see `too_long_of`.
    """

    tokenizer: Tokenizer | None
    sources: Mapping[str, AnySource]
    weights: tuple[float, ...]
    places: tuple[int, ...]
    max_epochs: tuple[float | None, ...]
    too_long: tuple[str | None, ...]


def open_sources(spec: LoadSpec, context: SourceContext) -> OpenedSources:
    """Builds the training sources; a source whose weight is 0 in every phase is not opened.

    Raises:
        DataError: there is no source, a source refuses its keys, or the tokenizer or the vocabulary does not match.
        ConfigError: labels or weights are invalid.
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
        raise DataError(
            f"source {foreign[0]!r} is a foreign loader, which cannot be mixed with other sources; make it the only source"
        )
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
    """Ignores a message; the default of `report`."""


def context_of(spec: LoadSpec, report: Report, **more: int) -> SourceContext:
    """Returns the context of sources; trains or loads the tokenizer. `more` are further fields of the context.

    Raises:
        DataError: see the tokenizer.
    """
    data = spec.data
    texts = tuple(
        documents
        for source in data.sources
        if isinstance(source, TextComponent) and weight_of(source) > 0 and (documents := source.texts()) is not None
    )
    workers = data.workers or usable_cores()
    context = SourceContext(spec.workspace, None, data.sequence_length, report, texts, workers, model=spec.model, **more)
    component: Any = data.tokenizer
    return replace(context, tokenizer=None if component is None else adapted(component.build(context)))


def build_source(component: Any, label: str, context: SourceContext, vocab_size: int | None) -> Any:
    """Builds one source and checks its largest id against the model's vocabulary.

    Raises:
        DataError: the source cannot be opened, or an id exceeds the model's vocabulary.
    """
    source: Any = component.build(context)
    if isinstance(source, StatefulIterable):
        return source
    largest = getattr(source, "seen_id", None) if source.max_id is None else source.max_id
    if vocab_size is not None and largest is not None and largest >= vocab_size:
        vocabulary = f", its tokenizer has {source.vocab_size}" if source.vocab_size else ""
        raise DataError(
            f"source {label!r} ({source.name}) holds token id {largest}, but the model's vocab_size is {vocab_size}{vocabulary}; "
            "raise model.vocab_size or prepare the data with another tokenizer"
        )
    return source


def refuse_tokenizers(sources: Mapping[str, Any], expected: Tokenizer | None = None) -> None:
    """Refuses sources of different tokenizers; sources that do not state their tokenizer are accepted.

    Args:
        sources: sources by label.
        expected: the required tokenizer, if known.

    Raises:
        DataError: the message lists the tokenizer of each source.
    """
    fingerprints = {
        label: fingerprint for label, source in sources.items() if (fingerprint := getattr(source, "tokenizer", None)) is not None
    }
    if len({*fingerprints.values(), *([expected.fingerprint] if expected else [])}) > 1:
        listed = ", ".join(f"{label}: {fingerprint[:12]}" for label, fingerprint in fingerprints.items())
        own = f"; the run's is {expected.fingerprint[:12]}" if expected else ""
        raise DataError(f"sources were made with different tokenizers ({listed}{own}); prepare them with the same one")


def _carried_tokenizer(sources: Mapping[str, Any]) -> Tokenizer | None:
    """Returns the tokenizer of the first store that has a copy of one, or None."""
    from forge_data.tokenizers.dump import tokenizer_of

    stores = (source for source in sources.values() if isinstance(source, StoreSource))
    return next((tokenizer for store in stores if (tokenizer := tokenizer_of(store)) is not None), None)


def open_packings(
    spec: LoadSpec, opened: OpenedSources, intervals: Sequence[PhaseInterval], report: Report
) -> list[Packing | StreamPacking]:
    """Returns the packings of the training sources, in rows of the longest length of the run.

    Raises:
        DataError: a source has no full row, or the recipe uses settings that a streamed source does not support.
    """
    data, unit = spec.data, max(interval.length for interval in intervals)
    if any(isinstance(source, StreamedSource) for source in opened.sources.values()):
        _refuse_counting(spec, opened)
    packings: list[Packing | StreamPacking] = []
    for (label, source), too_long in zip(opened.sources.items(), opened.too_long, strict=True):
        if isinstance(source, StreamedSource):
            _refuse_too_long(label, too_long)
            seed, shuffle = f"{spec.seed}/{label}", data.shuffle != "none"
            packings.append(StreamPacking(source, data.readers, unit, seed, data.shuffle_buffer, shuffle))
            continue
        if data.packing == "concatenate" and not isinstance(source, SourceWithMask):
            refuse_short(source, label, unit)
        packings.append(open_packing(spec, label, source, unit, report, too_long))
    return packings


def open_packing(spec: LoadSpec, label: str, source: Source, length: int, report: Report, too_long: str | None = None) -> Packing:
    """Packs one source into rows of `length` tokens; a pack plan is computed once and kept in the workspace.

    `too_long` is the setting of the source. Sources with items apply it when they are prepared.

    Raises:
        DataError: the packing would cut documents that must stay whole, or preference pairs do not fit the objective.
    """
    pairs = bool(getattr(source, "pairs", False))
    if pairs and spec.pairs is False:
        raise DataError(
            f"source {label!r} ({source.name}) has preference pairs, and training on the next token would also train the "
            "rejected answers; set objective.name = 'dpo', or train on the chosen ones in format = 'messages' or "
            "'prompt_completion'"
        )
    if spec.pairs and not pairs:
        raise DataError(
            f"source {label!r} ({source.name}) has no preference pairs, which the objective compares; use a source of "
            "format = 'preference', or another objective"
        )
    if pairs and not spec.masked:
        raise DataError("the answers of a preference pair would see each other; set data.documents = 'mask'")
    if pairs and too_long == "truncate":
        raise DataError(
            f"source {label!r}: too_long = 'truncate' would cut one answer of a preference pair; set 'error' or 'skip'"
        )
    if spec.pairs is not None:
        _refuse_labels(spec, label, source)
    if spec.data.packing == "concatenate":
        if isinstance(source, SourceWithItems | SourceWithMask):
            what = source.extras[0] if isinstance(source, SourceWithItems) else "a loss mask"
            raise DataError(
                f"documents of source {label!r} ({source.name}) have {what}, and packing = 'concatenate' would cut "
                "them; set data.packing = 'best_fit' or 'pad'"
            )
        _refuse_too_long(label, too_long)
        return ConcatenatedPacking(source, length)
    if isinstance(source, SourceWithItems):
        too_long = None
    elif isinstance(source, SourceWithMask):
        too_long = too_long or "error"  # the rest of a cut conversation lacks its beginning
    packing = planned(source, length, spec.data.packing, spec.workspace, label, spec.data.items_per_row, too_long)
    summary = packing.summary
    what = "preference pairs" if pairs else "documents"
    report(
        f"packed {label}: {summary['documents']:,} {what} in {summary['rows']:,} rows, {summary['efficiency']:.2%} full, "
        + (f"{summary['left_out']:,} {what} longer than a row were left out" if too_long == "skip" else "")
        + (f"{summary['truncated_documents']:,} {what} longer than a row were cut" if too_long != "skip" else "")
    )
    return packing


def _refuse_labels(spec: LoadSpec, label: str, source: Any) -> None:
    """Refuses a source whose labels are not those of the model, and rows in which labeled texts would see each other.

    Raises:
        DataError: the message says what to change.
    """
    labels, wanted = tuple(getattr(source, "labels", ())), tuple(getattr(spec.model, "labels", ()))
    if labels != wanted and not labels:
        raise DataError(
            f"source {label!r} ({source.name}) has no labels, but the model is a classifier (model.labels is set); use a source "
            "'labeled', or remove model.labels"
        )
    if labels != wanted:
        raise DataError(
            f"source {label!r} ({source.name}) has the labels {', '.join(labels)}, but model.labels has "
            f"{', '.join(wanted) or 'none'}; set both to the same names in the same order"
        )
    if labels and not spec.masked and spec.data.packing != "pad":
        raise DataError(
            f"source {label!r}: labeled texts in one row would see each other; set data.documents = 'mask' or "
            "data.packing = 'pad'"
        )


def _refuse_too_long(label: str, too_long: str | None) -> None:
    """Refuses `too_long` with packing 'concatenate', which may cut any document.

    Raises:
        DataError: `too_long` is set.
    """
    if too_long is not None:
        raise DataError(
            f"source {label!r}: too_long = {too_long!r} has no effect with packing = 'concatenate', which cuts documents at the "
            "end of every row; remove it, or set data.packing = 'best_fit' or 'pad'"
        )


def _refuse_counting(spec: LoadSpec, opened: OpenedSources) -> None:
    """Refuses settings that require the length of a stream or of its documents, which are unknown before they are read."""
    data = spec.data
    streams = [label for label, source in opened.sources.items() if isinstance(source, StreamedSource)]
    if data.packing != "concatenate":
        raise DataError(
            f"data.packing = {data.packing!r} needs the lengths of all documents in advance, but source {streams[0]!r} is a "
            "stream; set packing = 'concatenate', or prepare the source into a store"
        )
    limited = dict(zip(opened.sources, opened.max_epochs, strict=True))
    if data.epochs is not None or any(limited[label] is not None for label in streams):
        raise DataError(
            f"source {streams[0]!r} is a stream of unknown length, so its epochs cannot be counted; remove "
            "data.epochs and max_epochs and set train.max_steps"
        )
