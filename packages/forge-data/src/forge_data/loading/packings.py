"""The packing of every source of a run: how its documents become rows."""

from collections.abc import Callable, Sequence

from forge_core.errors import DataError
from forge_core.protocols.data import Source, SourceWithItems, StreamedSource
from forge_data.loading.open_sources import OpenedSources
from forge_data.loading.spec import LoadSpec
from forge_data.order.phases import Stage
from forge_data.packing.concatenate import Concatenated, Packing, refuse_short
from forge_data.packing.plan import planned
from forge_data.packing.streamed import Streamed

Report = Callable[[str], None]


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
        return Concatenated(source, length)
    too_long = None if isinstance(source, SourceWithItems) else too_long
    made = planned(source, length, spec.data.packing, spec.workspace, label, spec.data.items_per_row, too_long)
    found = made.summary
    report(
        f"packed {label}: {found['documents']:,} documents in {found['rows']:,} rows, {found['efficiency']:.2%} full, "
        + (f"{found['left_out']:,} documents longer than a row were left out" if too_long == "skip" else "")
        + (f"{found['truncated_documents']:,} documents longer than a row were cut" if too_long != "skip" else "")
    )
    return made


def open_packings(spec: LoadSpec, opened: OpenedSources, stages: Sequence[Stage], report: Report) -> list[Packing | Streamed]:
    """The packings of the training sources, in rows of the longest length of the run.

    Raises:
        DataError: a source has no full row, or the recipe asks of a stream what only a store can give.
    """
    data, unit = spec.data, max(stage.length for stage in stages)
    if any(isinstance(source, StreamedSource) for source in opened.sources.values()):
        _refuse_counting(spec, opened)
    found: list[Packing | Streamed] = []
    for (label, source), too_long in zip(opened.sources.items(), opened.too_long, strict=True):
        if isinstance(source, StreamedSource):
            _refuse_too_long(label, too_long)
            seed, shuffle = f"{spec.seed}/{label}", data.shuffle != "none"
            found.append(Streamed(source, data.readers, unit, seed, data.shuffle_buffer, shuffle))
            continue
        if data.packing == "concatenate":
            refuse_short(source, label, unit)
        found.append(open_packing(spec, label, source, unit, report, too_long))
    return found


def _refuse_too_long(label: str, too_long: str | None) -> None:
    """Refuses to deal with long documents where every document may be cut.

    Raises:
        DataError: the source of this label says what becomes of them.
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
