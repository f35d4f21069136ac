"""Numbers of rows to model inputs: windows of tokens from several packings, brought into one order."""

from collections.abc import Sequence

import numpy as np

from forge_core.errors import DataError
from forge_data.loading.rows import Rows
from forge_data.loading.spec import LoadSpec
from forge_data.packing.concatenate import Packing, RowWindows
from forge_data.packing.streamed import Streamed

_CHUNK = 1 << 17
"""Tokens that are worked on at a time, so that intermediate arrays stay in the cache."""


class Assembler:
    """Cuts rows from several packings and fills model inputs with them."""

    def __init__(self, packings: Sequence[Packing | Streamed], spec: LoadSpec, length: int, pieces: int = 1) -> None:
        """
        Args:
            packings: of each source.
            spec: of the run: the vocabulary that ids are compared with.
            length: T, tokens of a row.
            pieces: rows that are cut from one sample; streams are read in whole samples.
        """
        self.packings = packings
        self.length = length
        self._pieces = pieces
        self._limits = [_limit(packing, spec.vocab_size) for packing in packings]

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

    def cut_last(self, source: int) -> tuple[RowWindows, int]:
        """The short last row of a packing; see `Packing.cut_last`."""
        packing = self.packings[source]
        assert not isinstance(packing, Streamed), "a stream has no last row"
        cut, labeled = packing.cut_last()
        self._refuse_unknown(source, np.array([packing.rows]), cut.windows)
        return cut, labeled

    def _cut(self, source: int, numbers: np.ndarray) -> RowWindows:
        packing = self.packings[source]
        cut = packing.cut(numbers, self.length) if isinstance(packing, Streamed) else packing.cut(numbers)
        _refuse_borders(packing, numbers, cut)
        self._refuse_unknown(source, numbers, cut.windows)
        return cut

    def _refuse_unknown(self, source: int, numbers: np.ndarray, windows: np.ndarray) -> None:
        """Looks at every id that is read: what was known of a file when it was opened may not be what it holds now."""
        if windows.dtype.kind not in "ui" or not windows.size:
            return  # the label shift refuses other dtypes
        packing, (limit, why) = self.packings[source], self._limits[source]
        # One pass: as unsigned numbers, negative ids are larger than any vocabulary.
        unsigned = windows if windows.dtype.kind == "u" else windows.view(windows.dtype.str.replace("i", "u"))
        if unsigned.max() < limit:
            return
        wrong = (windows >= limit) | (windows < 0)
        if wrong.any():
            row, column = (int(place[0]) for place in np.nonzero(wrong))
            found = int(windows[row, column])
            where = "" if isinstance(packing, Streamed) else _where(packing, int(numbers[row]), column)
            raise DataError(f"{packing.source.name}{where}: id {found}, but {why if found >= 0 else 'no id is negative'}")


def _limit(packing: Packing | Streamed, vocab_size: int | None) -> tuple[int, str]:
    """(first id that no row of a packing may hold, why): the smallest of what is known."""
    source = packing.source
    known = [(1 << 63, "no vocabulary is that large")]
    if vocab_size is not None:
        known.append((vocab_size, f"the model's vocab_size is {vocab_size}"))
    if source.vocab_size is not None:
        known.append((source.vocab_size, f"its tokenizer has {source.vocab_size} ids"))
    if source.max_id is not None:
        when = getattr(source, "max_id_from", "when it was opened")
        known.append((source.max_id + 1, f"the largest id {when} was {source.max_id}"))
    return min(known)


def _refuse_borders(packing: Packing | Streamed, numbers: np.ndarray, cut: RowWindows) -> None:
    """Of a large index only a part was checked before it was used; of a plugin's source nothing."""
    rows, columns = cut.rows, cut.columns
    if getattr(packing.source, "borders_checked", False) or not len(rows):
        return
    width = cut.windows.shape[1]
    outside = (columns - 1).view(np.uint64) >= width - 1  # as unsigned numbers, those below 0 are very large
    flat = rows * width + columns
    falling = flat[1:] <= flat[:-1]
    if outside.any() or falling.any():
        row = int(rows[np.argmax(outside) if outside.any() else np.argmax(falling) + 1])
        where = "" if isinstance(packing, Streamed) else f" at token {packing.token_at(int(numbers[row]), 0)}"
        raise DataError(f"{packing.source.name}{where}: document ends do not ascend; `data verify` names the file and the byte")


def _where(packing: Packing, row: int, column: int) -> str:
    """The place of a token, with file and byte where the source knows them."""
    token = packing.token_at(row, column)
    place = getattr(packing.source, "place", None)
    return f" at token {token} ({place(token)})" if place else f" at token {token}"
