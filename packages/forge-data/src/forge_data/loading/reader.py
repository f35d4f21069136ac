"""Every sample of a run as arithmetic, and the rows of any step: the same on every rank and in every loader worker."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from forge_core.errors import DataError
from forge_core.protocols.data import Source, StreamedSource
from forge_data.loading.assemble import Assembler
from forge_data.loading.open_sources import Opened
from forge_data.loading.rows import Rows
from forge_data.loading.streaming import Position, Streamed, readers_for
from forge_data.order.cursor import EXACT, ROUNDED_PERIOD
from forge_data.order.phases import faults_of, refuse_faults, stages_of
from forge_data.order.samples import Samples, order_of
from forge_data.order.timeline import Timeline
from forge_data.packing.concatenate import Concatenated, Packing, refuse_short
from forge_data.packing.plan import planned
from forge_data.packing.portions import place_of
from forge_data.section import Data


def packing_for(data: Data, workspace: Path, report: Callable[[str], None]) -> Callable[[str], Callable[[Source, int], Packing]]:
    """How a recipe makes rows of a source: label -> (source, length) -> packing."""

    def make(label: str) -> Callable[[Source, int], Packing]:
        if data.packing == "concatenate":
            return Concatenated

        def make_planned(source: Source, length: int) -> Packing:
            made = planned(source, length, data.packing, workspace, label)
            found = made.summary
            report(
                f"packed {label}: {found['documents']:,} documents in {found['rows']:,} rows, {found['efficiency']:.2%} full, "
                f"{found['truncated_documents']:,} documents longer than a row were cut"
            )
            return made

        return make_planned

    return make


class Reading:
    """What fixes the samples of a run, and makes rows of them.

    Attributes:
        labels, sources: that some phase reads.
        unit: tokens of a sample: the longest row of the run.
        timeline: steps, samples and sources.
        packings: of each source in rows of `unit` tokens.
        streams: number and readers of each streamed source.
        readers: virtual readers of every stream.
        masked: rows come with positions and documents.
    """

    def __init__(
        self,
        data: Data,
        opened: Opened,
        *,
        seed: int,
        global_batch: int,
        vocab_size: int | None,
        workspace: Path,
        report: Callable[[str], None],
    ) -> None:
        refuse_faults(faults_of(data, global_batch))
        self.data, self.opened, self.seed, self.global_batch = data, opened, seed, global_batch
        self.vocab_size = vocab_size
        self.labels, self.sources = tuple(opened.sources), tuple(opened.sources.values())
        self.masked = data.documents == "mask"
        places = opened.places or tuple(range(len(self.sources)))
        self.stages = [replace(s, weights=tuple(s.weights[place] for place in places)) for s in stages_of(data, global_batch)]
        self.unit = max(stage.length for stage in self.stages)
        self.readers = 1
        self.packings = self._packings(packing_for(data, workspace, report))
        self.streams = {index: packing for index, packing in enumerate(self.packings) if isinstance(packing, Streamed)}
        rows = [None if isinstance(packing, Streamed) else packing.rows for packing in self.packings]
        epochs = opened.max_epochs or (None,) * len(rows)
        caps = [None if most is None or count is None else int(most * count) for most, count in zip(epochs, rows, strict=True)]
        if wrong := next((label for label, cap in zip(self.labels, caps, strict=True) if cap == 0), None):
            raise DataError(f"max_epochs of source {wrong!r} allows no whole sample; raise it, or set weight = 0")
        self.timeline = Timeline(self.stages, caps, data.temperature)
        self.samples = Samples(self.timeline, self.labels, rows, seed, order_of(data))
        self._assemblers: dict[int, Assembler] = {}

    def fill(self, rows: Rows, step: int, start: int, stop: int, at: int = 0) -> None:
        """Writes rows [start, stop) of the global batch of a step into `rows`, from its row `at` on.

        Rows of streams are read on: a step after the last one, and each reader's rows as often as once.
        """
        sources, numbers = self.rows_of(step, start, stop)
        self._assembler(self.timeline.span_at(step).length).fill(rows, at, sources, numbers)

    def rows_of(self, step: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """(sources, numbers of rows in them), each (stop - start,) int64, of rows [start, stop) of the global batch of a step."""
        span = self.timeline.span_at(step)
        pieces = self.unit // span.length
        first, after = start // pieces, -(-stop // pieces)
        sources, numbers = self.samples.locate(self.timeline.first_of(step) + first, after - first)
        if self.streams:
            numbers = numbers.copy()
            for source in self.streams:
                own = np.flatnonzero(sources == source)
                numbers[own] = (first + own) * self.readers // span.units
        if pieces > 1:
            part = slice(start - first * pieces, stop - first * pieces)
            sources = np.repeat(sources, pieces)[part]
            numbers = (numbers[:, None] * pieces + np.arange(pieces)).reshape(-1)[part]
        return sources, numbers

    def place_of(self, step: int, row: int, column: int) -> tuple[str, str]:
        """(label of the source, where in it the token lies) of a token of the global batch of a step, for messages."""
        (source,), (number,) = (found.tolist() for found in self.rows_of(step, row, row + 1))
        packing = self._assembler(self.timeline.span_at(step).length).packings[source]
        if isinstance(packing, Streamed):
            return self.labels[source], packing.source.name
        return self.labels[source], place_of(packing.source, packing.token_at(number, column))

    def positions(self, readers: Iterable[int]) -> dict[str, dict[str, Position]]:
        """Of these virtual readers, by source."""
        return {self.labels[source]: streamed.positions(readers) for source, streamed in self.streams.items()}

    def seek(self, positions: Mapping[str, Mapping[str, Position]]) -> None:
        """Takes up streams where `positions` left them."""
        for source, streamed in self.streams.items():
            streamed.seek(positions.get(self.labels[source], {}))

    def end(self) -> int | None:
        """Samples until the run is out of data; None = never."""
        ends = [self.timeline.end, None if self.data.epochs is None else self.samples.end(self.data.epochs)]
        return min((end for end in ends if end is not None), default=None)

    def begun(self, step: int) -> int:
        """How many stages and phases began before a step: two steps with the same number have the same identity."""
        return sum(stage.step < step for stage in self.stages) + sum(phase.start < step for phase in self.data.phases)

    def identity_at(self, step: int | None) -> dict[str, Any]:
        """Everything that fixes which sample has which number up to a step; None = for ever.

        Phases that lie ahead are left out, so that they can still be changed; so are sources that only they read.
        """
        begun = [stage for stage in self.stages if step is None or stage.step < step] or self.stages[:1]
        read = [any(stage.weights[index] > 0 for stage in begun) for index in range(len(self.labels))]
        mixture = self.timeline.segments[0].mixture
        found: dict[str, Any] = {
            "seed": self.seed,
            "global_batch": self.global_batch,
            "sequence_length": self.data.sequence_length,
            "packing": self.data.packing,
            "shuffle": self.data.shuffle,
            "sources": {
                label: {
                    "fingerprint": source.fingerprint[:32],
                    "share": f"{mixture.shares[index]}/{mixture.period}",
                    **({} if self.timeline.caps[index] is None else {"max_samples": self.timeline.caps[index]}),
                }
                for index, (label, source) in enumerate(zip(self.labels, self.sources, strict=True))
                if read[index]
            },
        }
        changes = [phase for phase in self.data.phases if phase.weights or phase.sequence_length or phase.global_batch]
        if begun_phases := [phase for phase in changes if step is None or phase.start < step]:
            found["phases"] = {str(phase.start): _without(asdict(phase), "start", "lr_scale") for phase in begun_phases}
        if self.unit != self.data.sequence_length:
            found["longest_sequence_length"] = self.unit
        if self.data.temperature != 1:
            found["temperature"] = self.data.temperature
        if self._redrawn(step):
            found["mixture"] = EXACT
        if self.data.shuffle == "block":
            found |= {"shuffle_block": self.data.shuffle_block, "shuffle_window": self.data.shuffle_window}
        if any(read[source] for source in self.streams):
            found |= {"readers": self.readers, "shuffle_buffer": self.data.shuffle_buffer}
        return found

    def _redrawn(self, step: int | None) -> bool:
        """Whether version 1 of mixtures, which rounded weights, may have drawn samples before a step in another order.

        It drew the same where the period of weights as they are written has 65,536 samples at most, and no ramp moved
        them; a ramp of the learning rate began the order anew where weights did not add up to 1.
        """
        before = None if step is None else self.timeline.first_of(step)
        segments = [segment for segment in self.timeline.segments if before is None or segment.first < before]
        powers = self.data.temperature != 1 and any(len({*segment.shares} - {0}) > 1 for segment in segments)
        if powers or any(sum(segment.shares) > ROUNDED_PERIOD for segment in segments):
            return True
        ramps = [phase for phase in self.data.phases if phase.ramp and (step is None or phase.start < step)]
        totals = [sum(next(s.weights for s in reversed(self.stages) if s.step <= phase.start)) for phase in ramps]
        return len(self.labels) > 1 and any(p.weights or total != 1 for p, total in zip(ramps, totals, strict=True))

    @cached_property
    def units_per_step(self) -> list[int]:
        """Samples of a step, in every stage of the run."""
        return [stage.batch * stage.length // self.unit for stage in self.stages]

    def _packings(self, packing: Callable[[str], Callable[[Source, int], Packing]]) -> list[Packing | Streamed]:
        if any(isinstance(source, StreamedSource) for source in self.sources):
            self._refuse_counting()
            self.readers = readers_for(self.data.readers, self.units_per_step)
        found: list[Packing | Streamed] = []
        for label, source in zip(self.labels, self.sources, strict=True):
            if not isinstance(source, StreamedSource):
                if self.data.packing == "concatenate":
                    refuse_short(source, label, self.unit)
                found.append(packing(label)(source, self.unit))
                continue
            seed = f"{self.seed}/{label}"
            shuffle = self.data.shuffle != "none"
            found.append(Streamed(source, self.readers, self.unit, seed, self.data.shuffle_buffer, shuffle))
        return found

    def _refuse_counting(self) -> None:
        """Nobody knows how long a stream is, nor its documents beforehand."""
        streams = [label for label, source in zip(self.labels, self.sources, strict=True) if isinstance(source, StreamedSource)]
        if self.data.packing != "concatenate":
            raise DataError(
                f"packing {self.data.packing!r} needs to know all documents beforehand, which source {streams[0]!r}, a stream, "
                "cannot say; use packing = 'concatenate', or prepare the source into a store"
            )
        limited = dict(zip(self.labels, self.opened.max_epochs, strict=False))
        if self.data.epochs is not None or any(limited.get(label) is not None for label in streams):
            raise DataError(
                f"the length of source {streams[0]!r}, a stream, is not known, so its epochs cannot be counted; remove "
                "data.epochs and max_epochs and set train.max_steps"
            )

    def _assembler(self, length: int) -> Assembler:
        if length not in self._assemblers:
            packings = [
                Concatenated(packing.source, length) if isinstance(packing, Concatenated) else packing
                for packing in self.packings
            ]
            self._assemblers[length] = Assembler(packings, length, self.masked, self.vocab_size, self.unit // length)
        return self._assemblers[length]


def _without(values: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in keys}
