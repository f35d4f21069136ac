"""The training stream of one rank: batches from any cursor on.

Step s consumes a fixed range of samples of one global sequence. Rank r of n reads the r-th of n equal parts of its rows, in
micro-batches. So the number of ranks, micro-batch size and loader workers change who reads a sample, but not the samples of a
step.
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
from forge_data.loading.rows import Buffers, RowReader, TokenRows, open_rows
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
    pairs: bool | None = False,
) -> "TrainingStream | ForeignStream":
    """Opens the training data of a recipe; the first call tokenizes text into `workspace`.

    Args:
        data: the recipe's `[data]` table.
        workspace: directory of prepared data; processes may share it.
        seed: seed of the job; `data.seed` takes precedence.
        global_batch: rows per optimizer step over all ranks.
        micro_batch: rows per `Batch`.
        rank, ranks: rank and size of the data axis.
        report: called with progress messages.
        vocab_size: vocabulary size of the model; a source with a larger id is refused.
        model: the model component, for sources that prepare further inputs of it.
        pairs: whether the objective compares preference pairs; see `LoadSpec`.

    Returns:
        The `TrainingStream`, or a `ForeignStream` if the only source is a foreign loader.

    Raises:
        ForgeError: a source cannot be read, or the batch sizes do not match.
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
    spec = LoadSpec(data, workspace, seed if data.seed is None else data.seed, global_batch, vocab_size, model, pairs)
    opened = open_sources(spec, context_of(spec, report, **shape))
    if any(isinstance(source, StatefulIterable) for source in opened.sources.values()):
        return _open_foreign(data, opened, shape)
    reader = open_rows(spec, opened, report)
    recipe = WorkerRecipe.of(reader.order, opened) if data.loader_workers else None
    return TrainingStream(reader, opened.tokenizer, micro_batch=micro_batch, rank=rank, ranks=ranks, recipe=recipe, report=report)


def _open_foreign(data: Data, opened: OpenedSources, shape: Mapping[str, int]) -> ForeignStream:
    """Returns the stream of a foreign loader, which is the only source."""
    unsupported = {"phases": data.phases, "loader_workers": data.loader_workers, "epochs": data.epochs}
    ((label, loader),) = opened.sources.items()
    if settings := [f"data.{name}" for name, value in unsupported.items() if value]:
        raise DataError(f"source {label!r} is a foreign loader, which does not support {', '.join(settings)}; remove them")
    return ForeignStream(loader, label, **shape)  # type: ignore[arg-type]


class TrainingStream:
    """The `Stream` of a recipe's sources, as one rank reads it.

    Attributes:
        tokenizer: tokenizer of the recipe, or the copy in a store, or None.
        fingerprint: fingerprint of all settings that determine the order of samples.
        tokens: total tokens of all sources, each counted once; streams, whose length is unknown, count as 0.
        steps: number of steps, or None if endless. Last samples that do not fill a global batch are left out.
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
        """
        Args:
            reader: reads the rows of the run.
            tokenizer: see the attribute.
            micro_batch, rank, ranks: see `open_stream`.
            recipe: opens the same sources in loader workers; required if `data.loader_workers` is not 0.
            report: called with the messages of sources in loader workers.
        """
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
        """Returns the cursor of step 0."""
        return self._cursor(0, {})

    def from_cursor(self, cursor: Cursor) -> Iterator[tuple[list[Batch], Cursor]]:
        """Yields, for each optimizer step, this rank's micro-batches and the cursor after them.

        Raises:
            DataError: immediately, if the cursor belongs to other data; the message names the differences.
        """
        sample, timeline = sample_of(cursor), self.order.timeline
        step = timeline.steps_in(sample)
        differences = refuse_other(cursor, self.order.identity_at(step), self.data.changed, self._advice())
        for difference in differences:
            _log.warning("the data differ from those of the checkpoint, which data.changed allows: %s", difference)
        if timeline.first_of(step) != sample:
            raise DataError(
                f"the cursor's sample {sample} is not the first of a step: step {step} begins at sample {timeline.first_of(step)}"
            )
        return self._steps_from(step, self._positions(cursor, step, bool(differences)))

    def _advice(self) -> str:
        """Returns advice for runs of an older Forge, which read documents without the tokenizer's special tokens."""
        coder: Any = self.tokenizer
        if not getattr(self.data.tokenizer, "add_special_tokens", False) or not (coder.prefix or coder.suffix):
            return ""
        return (
            "If an older Forge started this run, its documents lack the special tokens that the tokenizer adds, such as a BOS: "
            "set data.tokenizer.add_special_tokens = false to continue without them"
        )

    def lr_scale(self, step: int) -> float:
        """Returns the factor of the phases on the learning rate of a step."""
        return lr_scale_at(self.data.phases, step)

    def tokens_at(self, step: int) -> int:
        """Returns the number of tokens of a step's global batch, with or without a label, without padding."""
        span = self.order.timeline.span_at(step)
        if self.data.packing == "concatenate":
            return span.rows * span.length
        sources, numbers = self.order.rows_of(step, 0, span.rows)
        packings = enumerate(self.reader.packings)
        return sum(
            packing.tokens_in(numbers[sources == source]) for source, packing in packings if isinstance(packing, PlannedPacking)
        )

    def batches_at(self, step: int) -> int:
        """Returns the number of micro-batches of this rank in a step."""
        return self._shape(step)[0] // self.micro_batch

    def mix(self, step: int) -> dict[str, tuple[int, float]]:
        """Returns, by label, the tokens that the first `step` steps read and the number that the weights require.

        A row with padding counts as the mean tokens per row of its source, which is exact after every epoch.
        """
        timeline = self.order.timeline
        samples = timeline.first_of(step)
        pairs = zip(timeline.draws(samples), timeline.planned(samples), self._tokens_a_sample, strict=True)
        counts = ((round(drawn * tokens), float(planned * tokens)) for drawn, planned, tokens in pairs)
        return dict(zip(self.labels, counts, strict=True))

    def describe(self, steps: int | None = None) -> Mapping[str, Any]:
        """Returns a description of the data as JSON; with `steps`, also samples, tokens (counted as by `mix`) and epochs of
        each source in this number of steps."""
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
        """Returns the unigram entropy of the mixture in nats per token, including end-of-document tokens; None with a stream,
        and for labeled texts, whose tokens are not predicted."""
        if any(getattr(source, "labels", ()) for source in self.sources):
            return None
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
            with_items = StepItems(items, self._rows_of, self.steps, pin) if items.names else None
            for rows, after in make(step, positions):
                batches = rows.batches(self.micro_batch, self._first_row(step), pin, self._sources(step))
                if with_items is not None:
                    batches = with_items.add(step, batches)
                del rows  # so that the next step can reuse its memory
                step += 1
                cursor = self._cursor(step, after)
                checksums.reached(self._tokens_of(cursor["draws"]))
                yield batches, cursor
                del batches

    def _checksums(self, step: int) -> FirstEpoch:
        """Returns the verifier of this rank's files from a step on."""
        timeline = self.order.timeline
        draws = dict(zip(self.labels, timeline.draws(timeline.first_of(step)), strict=True))
        sources = dict(zip(self.labels, self.sources, strict=True)) if self.data.verify else {}
        return FirstEpoch(sources, self._tokens_of(draws), self.rank, self.ranks)

    def _tokens_of(self, draws: Mapping[str, int]) -> dict[str, int]:
        return {label: drawn * self.order.unit for label, drawn in draws.items()}

    def _made_here(self, step: int, positions: dict[str, Any]) -> Iterator[tuple[TokenRows, dict[str, Any]]]:
        """Yields (rows of this rank, positions of the streams after them) of each step, read in this process."""
        buffers = Buffers()
        self.reader.seek(step, positions)
        self._iterator = iterator = object()
        while self.steps is None or step < self.steps:
            if self.reader.streams and self._iterator is not iterator:
                raise DataError("a newer iterator reads the streamed sources, and only one can at a time; open the stream again")
            own, length = self._shape(step)
            buffers.drop_others((TokenRows.size_of(own, length, self.reader.spec.marks),))
            rows = TokenRows.take(buffers, own, length, self.reader.spec.marks)
            self.reader.fill(rows, step, self.rank * own, (self.rank + 1) * own)
            yield rows, self.reader.positions_after(step)
            del rows
            step += 1

    def _made_ahead(self, step: int, positions: dict[str, Any]) -> Iterator[tuple[TokenRows, dict[str, Any]]]:
        """Yields the same from worker processes, at least `prefetch` steps ahead; each worker reads whole steps."""
        assert self._recipe is not None, "loader workers need the recipe"
        workers = 1 if self.reader.streams else self.data.loader_workers  # every worker would read the whole stream
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
        """Returns (rows of this rank, tokens per row) of a step."""
        span = self.order.timeline.span_at(step)
        return span.rows // self.ranks, span.length

    def _sources(self, step: int) -> tuple[tuple[str, ...], np.ndarray] | None:
        """Returns the labels and the source of each of this rank's rows in a step; None if there is only one source."""
        if len(self.labels) == 1:
            return None
        own = self._shape(step)[0]
        return self.labels, self.order.rows_of(step, self.rank * own, (self.rank + 1) * own)[0]

    def _rows_of(self, step: int) -> list[tuple[int, int]]:
        """Returns this rank's rows of a step as (source number, row number in the source)."""
        own = self._shape(step)[0]
        sources, numbers = self.order.rows_of(step, self.rank * own, (self.rank + 1) * own)
        return list(zip(sources.tolist(), numbers.tolist(), strict=True))

    def _first_row(self, step: int) -> int:
        return self.order.timeline.first_row_of(step) + self.rank * self._shape(step)[0]

    def _positions(self, cursor: Cursor, step: int, other: bool) -> dict[str, Any]:
        """Returns the positions of the streams, by label.

        If the cursor belongs to `other` data, a stream without a position starts at its first document.
        """
        positions: dict[str, Any] = cursor.get("streams", {})
        draws = self.order.timeline.draws(self.order.timeline.first_of(step))
        for label in (self.labels[source] for source in self.reader.streams if draws[source]):
            if label not in positions and not other:
                raise DataError(f"the cursor has no position of the stream {label!r}, so this version of Forge did not write it")
            if label not in positions:
                _log.warning("the checkpoint has no position of the stream %r; it starts at its first document", label)
        return positions

    def _refuse_sizes(self, end: int | None) -> None:
        faults = list(batch_faults(self.data, self.reader.spec.global_batch, self.ranks, self.micro_batch))
        refuse_faults(faults)
        if self.steps == 0:
            limit = (
                f"data.epochs = {self.data.epochs} allows" if self.data.epochs is not None else "max_epochs of the sources allow"
            )
            raise DataError(
                f"{limit} only {end} samples, fewer than one global batch of {self.reader.spec.global_batch}; lower "
                "train.global_batch or data.sequence_length, or raise the number of epochs"
            )

    def _cursor(self, step: int, positions: Mapping[str, Any]) -> Cursor:
        timeline = self.order.timeline
        sample = timeline.first_of(step)
        streams = positions if self.reader.streams else None
        identity, fingerprint = self._identity(step)
        return cursor_at(sample, self.labels, timeline.draws(sample), identity, streams, fingerprint)

    def _identity(self, step: int) -> tuple[dict[str, Any], str]:
        """Returns the identity at a step and its fingerprint; they are computed once per interval or phase."""
        begun = self.order.begun(step)
        if begun not in self._identities:
            identity = self.order.identity_at(step)
            self._identities[begun] = identity, fingerprint_of(identity)
        return self._identities[begun]
