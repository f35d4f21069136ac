"""One rank's share of a run: batches for a cursor.

Step s consumes a fixed range of samples of one global sequence. Rank r of n takes the r-th n-th of its rows, cut into
micro-batches. So ranks, micro-batch and loader workers change who reads a sample, never which samples a step has.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from forge_core.batch import Batch
from forge_core.errors import DataError
from forge_core.protocols.data import Cursor, StatefulIterable, StreamedSource, Tokenizer
from forge_data import accelerator
from forge_data.loading.interop import ForeignStream
from forge_data.loading.items import Items, StepItems
from forge_data.loading.rows import Buffers, RowReader, Rows, open_rows
from forge_data.loading.sources import LoadSpec, OpenedSources, Report, context_of, open_sources, silent
from forge_data.loading.worker_pool import WorkerPool, WorkerRecipe
from forge_data.order.cursor import cursor_at, fingerprint_of, refuse_other, sample_of
from forge_data.order.phases import batch_faults, lr_scale_at, refuse_faults
from forge_data.packing.plan import PlannedPacking
from forge_data.section import Data
from forge_data.sources.scan import token_counts, unigram_entropy
from forge_data.storage.checksums import FirstEpoch

_log = logging.getLogger(__name__)


def open_stream(
    data: Data,
    *,
    workspace: Path,
    seed: int,
    global_batch: int,
    micro_batch: int,
    rank: int = 0,
    ranks: int = 1,
    report: Report = silent,
    vocab_size: int | None = None,
    model: Any = None,
) -> "TrainingStream | ForeignStream":
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
        return _open_foreign(data, opened, shape)
    reader = open_rows(spec, opened, report)
    recipe = WorkerRecipe.of(reader.order, opened) if data.loader_workers else None
    return TrainingStream(reader, opened.tokenizer, micro_batch=micro_batch, rank=rank, ranks=ranks, recipe=recipe, report=report)


def _open_foreign(data: Data, opened: OpenedSources, shape: Mapping[str, int]) -> ForeignStream:
    """The stream of the only source, which is a loader itself."""
    chosen = {"phases": data.phases, "loader_workers": data.loader_workers, "epochs": data.epochs}
    ((label, loader),) = opened.sources.items()
    if settings := [f"data.{name}" for name, value in chosen.items() if value]:
        raise DataError(f"source {label!r} is a foreign loader, which does not support {', '.join(settings)}; remove them")
    return ForeignStream(loader, label, **shape)  # type: ignore[arg-type]


class TrainingStream:
    """The `Stream` of a recipe's sources, as one rank reads it.

    Attributes:
        tokenizer: of the recipe, or the copy that a store carries.
        fingerprint: of everything that fixes the order of samples.
        tokens: in all sources together, each counted once; streams, whose length is unknown, count nothing.
        steps: until the stream ends, or None. Samples of the last epoch that fill no global batch are left out.
    """

    def __init__(
        self,
        reader: RowReader,
        tokenizer: Tokenizer | None,
        *,
        micro_batch: int,
        rank: int,
        ranks: int,
        recipe: WorkerRecipe | None = None,
        report: Callable[[str], None] | None = None,
    ) -> None:
        """`recipe` opens the same sources in loader workers; needed where `data.loader_workers` is not 0. `report` is told what
        these sources say while they are read."""
        self.reader, self.order, self.data = reader, reader.order, reader.spec.data
        self.tokenizer = tokenizer
        self.labels, self.sources = self.order.labels, self.order.sources
        self.samples = self.order.samples
        self.tokens = sum(getattr(source, "tokens", 0) for source in self.sources)
        self.micro_batch, self.rank, self.ranks = micro_batch, rank, ranks
        self._recipe, self._report = recipe, report
        self._iterator: object = None
        self._identities: dict[int, tuple[dict[str, Any], str]] = {}
        self.fingerprint = fingerprint_of(self.order.identity_at(None))
        summaries = (getattr(packing, "summary", None) for packing in reader.packings)
        self._tokens_a_sample = [Fraction(s["tokens"], s["rows"]) if s else Fraction(self.order.unit) for s in summaries]
        end = self.order.end()
        self.steps = None if end is None else self.order.timeline.steps_in(end)
        self._refuse_sizes(end)

    def start(self) -> Cursor:
        """The cursor of step 0."""
        return self._cursor(0, {})

    def from_cursor(self, cursor: Cursor) -> Iterator[tuple[list[Batch], Cursor]]:
        """Per optimizer step: this rank's micro-batches and the cursor after them.

        Raises:
            DataError: at once, when the cursor belongs to other data; names the difference.
        """
        sample, timeline = sample_of(cursor), self.order.timeline
        step = timeline.steps_in(sample)
        differences = refuse_other(cursor, self.order.identity_at(step), self.data.changed, self._advice())
        for difference in differences:
            _log.warning("the data are not those of the checkpoint, as data.changed allows: %s", difference)
        if timeline.first_of(step) != sample:
            raise DataError(f"sample {sample} is inside step {step}, which begins at sample {timeline.first_of(step)}")
        return self._steps_from(step, self._positions(cursor, step, bool(differences)))

    def _advice(self) -> str:
        """What to do where an older Forge began the run: it read documents without what their tokenizer's own rule adds."""
        coder: Any = self.tokenizer
        if not getattr(self.data.tokenizer, "add_special_tokens", False) or not (coder.prefix or coder.suffix):
            return ""
        return (
            "If an older Forge began this run, its documents lack what the tokenizer puts around a text, such as a BOS: "
            "data.tokenizer.add_special_tokens = false goes on without it"
        )

    def lr_scale(self, step: int) -> float:
        """Factor of the phases on the learning rate of a step."""
        return lr_scale_at(self.data.phases, step)

    def tokens_at(self, step: int) -> int:
        """Tokens of the global batch of a step, with or without a label; padding does not count."""
        span = self.order.timeline.span_at(step)
        if self.data.packing == "concatenate":
            return span.rows * span.length
        sources, numbers = self.order.rows_of(step, 0, span.rows)
        packings = enumerate(self.reader.packings)
        return sum(
            packing.tokens_in(numbers[sources == source]) for source, packing in packings if isinstance(packing, PlannedPacking)
        )

    def batches_at(self, step: int) -> int:
        """Micro-batches of this rank in a step."""
        return self._shape(step)[0] // self.micro_batch

    def mix(self, step: int) -> dict[str, tuple[int, float]]:
        """Tokens of each source that the first `step` steps read, and how many the weights ask for.

        Rows with padding count as the mean of their source has tokens, which is exact after every epoch.
        """
        timeline = self.order.timeline
        samples = timeline.first_of(step)
        pairs = zip(timeline.draws(samples), timeline.planned(samples), self._tokens_a_sample, strict=True)
        found = ((round(drawn * tokens), float(asked * tokens)) for drawn, asked, tokens in pairs)
        return dict(zip(self.labels, found, strict=True))

    def describe(self, steps: int | None = None) -> Mapping[str, Any]:
        """What is read, JSON as it stands; with `steps` also samples, tokens and epochs of each source in that time, tokens
        as `mix` counts them."""
        timeline = self.order.timeline
        draws = timeline.draws(timeline.first_of(steps)) if steps is not None else None
        mixture = timeline.segments[0].mixture
        sources = []
        for index, (label, source) in enumerate(zip(self.labels, self.sources, strict=True)):
            rows = self.samples.rows[index]
            entry: dict[str, Any] = {
                "label": label,
                "source": source.name,
                "fingerprint": source.fingerprint,
                "tokens": getattr(source, "tokens", None),
                "rows": rows,
                "share": mixture.shares[index] / mixture.period,
            }
            if summary := getattr(self.reader.packings[index], "summary", None):
                entry["packing"] = summary
            if draws is not None:
                read = {"samples": draws[index], "tokens_read": round(draws[index] * self._tokens_a_sample[index])}
                entry |= read | {"epochs": None if rows is None else draws[index] / rows}
            sources.append(entry)
        return {
            "fingerprint": self.fingerprint,
            "sequence_length": self.data.sequence_length,
            "tokens": self.tokens,
            "steps": self.steps,
            "sources": sources,
        }

    def entropy(self) -> float | None:
        """Unigram entropy of the mixture in nats per token, ends of documents included; None when it has a stream."""
        counted = [source for source in self.sources if not isinstance(source, StreamedSource)]
        if len(counted) < len(self.sources):
            return None
        mixture = self.order.timeline.segments[0].mixture
        shares = [share / mixture.period for share in mixture.shares]
        return unigram_entropy([token_counts(source) for source in counted], shares)

    def _steps_from(self, step: int, positions: dict[str, Any]) -> Iterator[tuple[list[Batch], Cursor]]:
        make = self._made_ahead if self.data.loader_workers else self._made_here
        pin = accelerator.is_used()
        with closing(self._checksums(step)) as checksums, Items(self.reader.packings, self.data.workers) as items:
            with_items = StepItems(items, self._rows_of, self.steps, pin)
            for rows, after in make(step, positions):
                batches = rows.batches(self.micro_batch, self._first_row(step), pin, self._sources(step))
                batches = with_items.add(step, batches)
                del rows  # else its memory would count as held while the next step looks for free memory
                step += 1
                cursor = self._cursor(step, after)
                checksums.reached(self._tokens_of(cursor["draws"]))
                yield batches, cursor
                del batches

    def _checksums(self, step: int) -> FirstEpoch:
        """What compares this rank's files from a step on."""
        timeline = self.order.timeline
        draws = dict(zip(self.labels, timeline.draws(timeline.first_of(step)), strict=True))
        sources = dict(zip(self.labels, self.sources, strict=True)) if self.data.verify else {}
        return FirstEpoch(sources, self._tokens_of(draws), self.rank, self.ranks)

    def _tokens_of(self, draws: Mapping[str, int]) -> dict[str, int]:
        return {label: drawn * self.order.unit for label, drawn in draws.items()}

    def _made_here(self, step: int, positions: dict[str, Any]) -> Iterator[tuple[Rows, dict[str, Any]]]:
        """(rows of this rank, positions of the streams after them) of each step."""
        buffers = Buffers()
        self.reader.seek(step, positions)
        self._iterator = iterator = object()
        while self.steps is None or step < self.steps:
            if self.reader.streams and self._iterator is not iterator:
                raise DataError("streamed sources are read by one iterator at a time, and a newer one took over; open them again")
            own, length = self._shape(step)
            buffers.drop_others((Rows.size_of(own, length, self.reader.spec.marks),))
            rows = Rows.take(buffers, own, length, self.reader.spec.marks)
            self.reader.fill(rows, step, self.rank * own, (self.rank + 1) * own)
            yield rows, self.reader.positions_after(step)
            del rows
            step += 1

    def _made_ahead(self, step: int, positions: dict[str, Any]) -> Iterator[tuple[Rows, dict[str, Any]]]:
        """The same by worker processes, `prefetch` steps ahead, and as many as there are workers: each makes another step."""
        assert self._recipe is not None, "loader workers need the recipe"
        workers = 1 if self.reader.streams else self.data.loader_workers  # each would read all that a stream gives
        with WorkerPool(self._recipe, workers, (step, positions), self._report) as pool:
            ahead, lead = step, max(self.data.prefetch, workers)
            while self.steps is None or step < self.steps:
                while ahead < step + lead and (self.steps is None or ahead < self.steps):
                    own, length = self._shape(ahead)
                    pool.ask(ahead, self.rank * own, own, length)
                    ahead += 1
                yield pool.collect()
                step += 1

    def _shape(self, step: int) -> tuple[int, int]:
        """(rows of this rank, tokens of a row) of a step."""
        span = self.order.timeline.span_at(step)
        return span.rows // self.ranks, span.length

    def _sources(self, step: int) -> tuple[tuple[str, ...], np.ndarray] | None:
        """Of this rank's rows in a step, where there are several sources to tell apart."""
        if len(self.labels) == 1:
            return None
        own = self._shape(step)[0]
        return self.labels, self.order.rows_of(step, self.rank * own, (self.rank + 1) * own)[0]

    def _rows_of(self, step: int) -> list[tuple[int, int]]:
        """This rank's rows of a step, each by the number of its source and its number there."""
        own = self._shape(step)[0]
        sources, numbers = self.order.rows_of(step, self.rank * own, (self.rank + 1) * own)
        return list(zip(sources.tolist(), numbers.tolist(), strict=True))

    def _first_row(self, step: int) -> int:
        return self.order.timeline.first_row_of(step) + self.rank * self._shape(step)[0]

    def _positions(self, cursor: Cursor, step: int, other: bool) -> dict[str, Any]:
        """Positions of the streams, by label. A stream without a position in a cursor of `other` data begins at its beginning."""
        found: dict[str, Any] = cursor.get("streams", {})
        draws = self.order.timeline.draws(self.order.timeline.first_of(step))
        for label in (self.labels[source] for source in self.reader.streams if draws[source]):
            if label not in found and not other:
                raise DataError(f"the cursor has no position of the stream {label!r}; it is not one that this Forge wrote")
            if label not in found:
                _log.warning("the checkpoint has no position of the stream %r, which is read from its first document on", label)
        return found

    def _refuse_sizes(self, end: int | None) -> None:
        faults = list(batch_faults(self.data, self.reader.spec.global_batch, self.ranks, self.micro_batch))
        refuse_faults(faults)
        if self.steps == 0:
            limit = (
                f"data.epochs = {self.data.epochs} gives" if self.data.epochs is not None else "max_epochs of the sources give"
            )
            raise DataError(
                f"{limit} {end} samples, fewer than one global batch of {self.reader.spec.global_batch}; lower "
                "train.global_batch or data.sequence_length, or raise the number of epochs"
            )

    def _cursor(self, step: int, positions: Mapping[str, Any]) -> Cursor:
        timeline = self.order.timeline
        sample = timeline.first_of(step)
        streams = positions if self.reader.streams else None
        identity, fingerprint = self._identity(step)
        return cursor_at(sample, self.labels, timeline.draws(sample), identity, streams, fingerprint)

    def _identity(self, step: int) -> tuple[dict[str, Any], str]:
        """The identity at a step and its fingerprint: worked out where an interval or phase begins, not at every step."""
        begun = self.order.begun(step)
        if begun not in self._identities:
            identity = self.order.identity_at(step)
            self._identities[begun] = identity, fingerprint_of(identity)
        return self._identities[begun]
