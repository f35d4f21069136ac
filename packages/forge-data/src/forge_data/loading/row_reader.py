"""Rows of any step, read from the packings of the sources."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forge_data.loading.assemble import Assembler
from forge_data.loading.open_sources import OpenedSources
from forge_data.loading.packings import open_packings
from forge_data.loading.rows import Rows
from forge_data.loading.sample_order import SampleOrder, stages_for
from forge_data.loading.spec import LoadSpec
from forge_data.packing.concatenate import Concatenated, Packing
from forge_data.packing.portions import place_of
from forge_data.packing.streamed import Position, Streamed


class RowReader:
    """Makes the rows that a `SampleOrder` names.

    Attributes:
        spec: of the run.
        order: which rows a step has.
        packings: of each source in rows of `order.unit` tokens.
        streams: number and rows of each streamed source.
    """

    def __init__(self, spec: LoadSpec, order: SampleOrder, packings: Sequence[Packing | Streamed]) -> None:
        self.spec, self.order, self.packings = spec, order, packings
        self.streams = {index: packing for index, packing in enumerate(packings) if isinstance(packing, Streamed)}
        self._assemblers: dict[int, Assembler] = {}

    def fill(self, rows: Rows, step: int, start: int, stop: int, at: int = 0) -> None:
        """Writes rows [start, stop) of the global batch of a step into `rows`, from its row `at` on.

        A stream goes on from row to row: its rows are read in ascending order.
        """
        sources, numbers = self.order.rows_of(step, start, stop)
        self._assembler(self.order.timeline.span_at(step).length).fill(rows, at, sources, numbers)

    def place_of(self, step: int, row: int, column: int) -> tuple[str, str]:
        """(label of the source, where in it the token lies) of a token of the global batch of a step, for messages."""
        (source,), (number,) = (found.tolist() for found in self.order.rows_of(step, row, row + 1))
        packing = self._assembler(self.order.timeline.span_at(step).length).packings[source]
        if isinstance(packing, Streamed):
            return self.order.labels[source], packing.source.name
        return self.order.labels[source], place_of(packing.source, packing.token_at(number, column))

    def positions_after(self, step: int) -> dict[str, dict[str, Any]]:
        """Where the streams go on after a step, by source; reads over what other ranks take of the step."""
        found = {}
        draws = self._draws_before(step + 1)
        for source, streamed in self.streams.items():
            streamed.skip_to(draws[source])
            found[self.order.labels[source]] = streamed.position()
        return found

    def seek(self, step: int, positions: Mapping[str, Position]) -> None:
        """Continues the streams at a step: at their `positions`, those without one at their first document."""
        draws = self._draws_before(step)
        for source, streamed in self.streams.items():
            streamed.seek(draws[source], positions.get(self.order.labels[source]))

    def _draws_before(self, step: int) -> list[int]:
        timeline = self.order.timeline
        return timeline.draws(timeline.first_of(step)) if self.streams else []

    def _assembler(self, length: int) -> Assembler:
        if length not in self._assemblers:
            packings = [
                Concatenated(packing.source, length) if isinstance(packing, Concatenated) else packing
                for packing in self.packings
            ]
            self._assemblers[length] = Assembler(packings, self.spec, length, self.order.unit // length)
        return self._assemblers[length]


def open_rows(spec: LoadSpec, opened: OpenedSources, report: Callable[[str], None]) -> RowReader:
    """The order of a run and its rows, from sources that are open.

    Raises:
        ForgeError: the sources do not fit the recipe.
    """
    stages = stages_for(spec, opened)
    packings = open_packings(spec, opened, stages, report)
    rows = [None if isinstance(packing, Streamed) else packing.rows for packing in packings]
    return RowReader(spec, SampleOrder(spec, opened, stages, rows), packings)
