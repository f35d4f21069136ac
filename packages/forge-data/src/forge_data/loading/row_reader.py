"""Rows of any step, read from the packings of the sources."""

from collections.abc import Callable, Iterable, Mapping, Sequence

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
        streams: number and virtual readers of each streamed source.
    """

    def __init__(self, spec: LoadSpec, order: SampleOrder, packings: Sequence[Packing | Streamed]) -> None:
        self.spec, self.order, self.packings = spec, order, packings
        self.streams = {index: packing for index, packing in enumerate(packings) if isinstance(packing, Streamed)}
        self._assemblers: dict[int, Assembler] = {}

    def fill(self, rows: Rows, step: int, start: int, stop: int, at: int = 0) -> None:
        """Writes rows [start, stop) of the global batch of a step into `rows`, from its row `at` on.

        A stream goes on from row to row: its steps are read in order, and the rows of each reader once.
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

    def positions(self, readers: Iterable[int]) -> dict[str, dict[str, Position]]:
        """Of these virtual readers, by source."""
        return {self.order.labels[source]: streamed.positions(readers) for source, streamed in self.streams.items()}

    def seek(self, positions: Mapping[str, Mapping[str, Position]]) -> None:
        """Continues streams at `positions`."""
        for source, streamed in self.streams.items():
            streamed.seek(positions.get(self.order.labels[source], {}))

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
    readers = next((packing.readers for packing in packings if isinstance(packing, Streamed)), 1)
    return RowReader(spec, SampleOrder(spec, opened, stages, rows, readers), packings)
