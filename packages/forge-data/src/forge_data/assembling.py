"""Numbers of rows to model inputs: windows of tokens from several packings, brought into one order."""

from collections.abc import Sequence

import numpy as np

from forge_core.errors import DataError
from forge_data.packing import Cut, Packing
from forge_data.rows import Rows
from forge_data.streaming import Streamed

_CHUNK = 1 << 17
"""Tokens that are worked on at a time, so that intermediate arrays stay in the cache."""


class Assembler:
    """Cuts rows from several packings and fills model inputs with them."""

    def __init__(
        self, packings: Sequence[Packing | Streamed], length: int, masked: bool, vocab_size: int | None, pieces: int = 1
    ) -> None:
        """
        Args:
            packings: of each source.
            length: T, tokens of a row.
            masked: positions and documents are wanted.
            vocab_size: of the model, where ids are to be checked.
            pieces: rows that are cut from one sample; streams are read in whole samples.
        """
        self.packings = packings
        self.length = length
        self.masked = masked
        self.vocab_size = vocab_size
        self._pieces = pieces

    def fill(self, rows: Rows, at: int, sources: np.ndarray, numbers: np.ndarray) -> None:
        """Writes rows `numbers` (N,) of packings `sources` (N,), in this order, from row `at` on."""
        for source in range(len(self.packings)):
            own = np.flatnonzero(sources == source)
            # Chunks of about the same size: a short rest costs as much besides its tokens as a whole one.
            chunks = max(1, round(len(own) * self.length / _CHUNK))
            size = max(1, -(-len(own) // (chunks * self._pieces))) * self._pieces
            for start in range(0, len(own), size):
                part = own[start : start + size]
                rows.fill(at + part, self._cut(source, numbers[part]))

    def cut_last(self, source: int) -> tuple[Cut, int]:
        """The short last row of a packing; see `Packing.cut_last`."""
        packing = self.packings[source]
        assert not isinstance(packing, Streamed), "a stream has no last row"
        cut, labelled = packing.cut_last()
        self._refuse_unknown(packing, np.array([packing.rows]), cut.windows)
        return cut, labelled

    def _cut(self, source: int, numbers: np.ndarray) -> Cut:
        packing = self.packings[source]
        cut = packing.cut(numbers, self.length) if isinstance(packing, Streamed) else packing.cut(numbers)
        _refuse_borders(packing, numbers, cut)
        self._refuse_unknown(packing, numbers, cut.windows)
        return cut

    def _refuse_unknown(self, packing: Packing | Streamed, numbers: np.ndarray, windows: np.ndarray) -> None:
        """Reads every id of a source whose largest one is unknown; of the others it was compared when they were opened."""
        if packing.source.max_id is not None or self.vocab_size is None:
            return
        wrong = (windows >= self.vocab_size) | (windows < 0)
        if wrong.any():
            row, column = (int(place[0]) for place in np.nonzero(wrong))
            found = int(windows[row, column])
            where = "" if isinstance(packing, Streamed) else _where(packing, int(numbers[row]), column)
            raise DataError(f"{packing.source.name}{where}: id {found}, but the model's vocab_size is {self.vocab_size}")


def _refuse_borders(packing: Packing | Streamed, numbers: np.ndarray, cut: Cut) -> None:
    """Of a large index only a part was checked when it was opened; of a plugin's source nothing."""
    rows, columns = cut.rows, cut.columns
    if not len(rows):
        return
    wrong = (columns < 1) | (columns >= cut.windows.shape[1])
    wrong[1:] |= (columns[1:] <= columns[:-1]) & (rows[1:] == rows[:-1])
    if wrong.any():
        row = int(rows[np.argmax(wrong)])
        where = "" if isinstance(packing, Streamed) else f" at token {packing.token_at(int(numbers[row]), 0)}"
        raise DataError(f"{packing.source.name}{where}: document ends do not ascend; data verify names the file and the byte")


def _where(packing: Packing, row: int, column: int) -> str:
    """The place of a token, with file and byte where the source knows them."""
    token = packing.token_at(row, column)
    place = getattr(packing.source, "place", None)
    return f" at token {token} ({place(token)})" if place else f" at token {token}"
