"""Opens the training data of a recipe."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forge_core.errors import DataError
from forge_core.protocols.data import StatefulIterable
from forge_data.loading.foreign_loader import ForeignStream
from forge_data.loading.open_sources import OpenedSources, context_of, open_sources
from forge_data.loading.row_reader import open_rows
from forge_data.loading.spec import LoadSpec
from forge_data.loading.stream import TrainingStream
from forge_data.loading.workers.recipe import WorkerRecipe
from forge_data.section import Data

Report = Callable[[str], None]


def _silent(message: str) -> None:
    """Says nothing."""


def open_stream(
    data: Data,
    *,
    workspace: Path,
    seed: int,
    global_batch: int,
    micro_batch: int,
    rank: int = 0,
    ranks: int = 1,
    report: Report = _silent,
    vocab_size: int | None = None,
    model: Any = None,
) -> TrainingStream | ForeignStream:
    """Opens the training data of a recipe; text is tokenized into `workspace` the first time.

    Args:
        data: the recipe's `[data]` table.
        workspace: where prepared data is kept; safe to share between processes.
        seed: of the job; `data.seed` goes before it.
        global_batch: rows per optimizer step over all ranks.
        micro_batch: rows of one `Batch`.
        rank, ranks: of the data axis.
        report: called with progress messages.
        vocab_size: of the model; a source with a larger id is refused.
        model: the model component, for sources that prepare what it takes besides tokens.

    Returns:
        The `TrainingStream`; or, where the only source is a foreign loader, the `ForeignStream` that reads it.

    Raises:
        ForgeError: something cannot be read as what it claims to be, or the sizes do not fit each other.
    """
    if not 0 <= rank < ranks or micro_batch < 1 or global_batch < 1:
        raise DataError(
            f"expected 0 <= rank < ranks and batches of at least 1, got rank {rank} of {ranks}, micro_batch {micro_batch}, "
            f"global_batch {global_batch}"
        )
    if global_batch % (ranks * micro_batch):
        portion = f"{ranks * micro_batch} = {ranks} data ranks x micro_batch {micro_batch}"
        raise DataError(
            f"global_batch {global_batch} is not a multiple of {portion}; change train.micro_batch or the number of ranks"
        )
    shape = {"rank": rank, "ranks": ranks, "global_batch": global_batch, "micro_batch": micro_batch}
    spec = LoadSpec(data, workspace, seed if data.seed is None else data.seed, global_batch, vocab_size, model)
    opened = open_sources(spec, context_of(spec, report, **shape))
    if any(isinstance(source, StatefulIterable) for source in opened.sources.values()):
        return _foreign(data, opened, shape)
    reader = open_rows(spec, opened, report)
    recipe = WorkerRecipe.of(reader.order, opened) if data.loader_workers else None
    return TrainingStream(reader, opened.tokenizer, micro_batch=micro_batch, rank=rank, ranks=ranks, recipe=recipe)


def _foreign(data: Data, opened: OpenedSources, shape: Mapping[str, int]) -> ForeignStream:
    """The stream of the only source, which is a loader itself."""
    chosen = {"phases": data.phases, "loader_workers": data.loader_workers, "epochs": data.epochs}
    ((label, loader),) = opened.sources.items()
    if settings := [f"data.{name}" for name, value in chosen.items() if value]:
        raise DataError(f"source {label!r} is a foreign loader, which does not support {', '.join(settings)}; remove them")
    return ForeignStream(loader, label, **shape)  # type: ignore[arg-type]
