"""What a packing is, and the one that cuts rows from the stream of documents; the document and position of each token.

A packing offers `rows` and `cut`: the windows of some rows and the document ends inside them. `ConcatenatedPacking` cuts
every T tokens: row i is tokens [i T, (i + 1) T) of the stream plus one more token, the last label. A document that is cut
goes on in another row, where it counts as a separate document. Packings that keep documents whole are in `plan`.
"""

from typing import NamedTuple, Protocol

import numpy as np

from forge_core.errors import DataError
from forge_core.protocols.data import Source


class RowWindows(NamedTuple):
    """Windows of N rows.

    Attributes:
        windows: (N, T + 1) token ids in the stored dtype.
        rows: (K,) int64 row of each document end, ascending.
        columns: (K,) int64 its column, 1 <= column <= T: token `column` of the window begins another document.
        filled: (N,) int64 columns that hold tokens; what follows is padding. None: every row is full.
        learned: (N, T + 1) bool, whether each token is predicted. None: all are.
    """

    windows: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    filled: np.ndarray | None = None
    learned: np.ndarray | None = None


class Packing(Protocol):
    """Rows of one source.

    Attributes:
        rows: rows that training reads.
        ragged: rows that evaluation reads: one more where the last one is short.
    """

    source: Source
    length: int
    rows: int
    ragged: int

    def cut(self, numbers: np.ndarray) -> RowWindows:
        """The windows of rows `numbers` (N,) int64, each below `rows`."""
        ...

    def cut_last(self) -> tuple[RowWindows, int]:
        """The short last row, filled up with token 0, and how many of its columns have a label."""
        ...

    def token_at(self, number: int, column: int) -> int:
        """Where in the source the token in a column of a row lies, for messages."""
        ...

    def items(self, number: int) -> list[tuple[int, int]]:
        """Of a source with items: ranges [first, stop) of those in a row, in the order of their places."""
        ...


class ConcatenatedPacking:
    """Rows of T tokens cut from one source, back to back.

    Attributes:
        rows: full rows; the last fewer than T + 1 tokens are in none.
        ragged: rows that reach the last token too, the last one perhaps short: what evaluation reads.
    """

    def __init__(self, source: Source, length: int) -> None:
        self.source = source
        self.length = length
        self.rows = max(0, (source.tokens - 1) // length)
        self.ragged = -(-max(0, source.tokens - 1) // length)

    def cut(self, numbers: np.ndarray) -> RowWindows:
        """The windows of full rows `numbers` (N,) int64."""
        starts = numbers * self.length
        rows, columns = self.source.borders(starts.astype(np.uint64), self.length)
        return RowWindows(self.source.windows(starts, self.length + 1), rows, columns)

    def token_at(self, number: int, column: int) -> int:
        """Where in the source the token in a column of a row lies."""
        return number * self.length + column

    def items(self, number: int) -> list[tuple[int, int]]:
        """None: sources with items are not packed this way."""
        return []

    def cut_last(self) -> tuple[RowWindows, int]:
        """The short last row, filled up with token 0, and how many of its columns have a label."""
        start = self.rows * self.length
        found = self.source.read(start, self.source.tokens)
        windows = np.zeros((1, self.length + 1), dtype=found.dtype)
        windows[0, : len(found)] = found
        columns = (self.source.ends(start, self.source.tokens) - np.uint64(start)).astype(np.int64)
        return RowWindows(windows, np.zeros(len(columns), dtype=np.int64), columns), len(found) - 1


def places(cut: RowWindows) -> tuple[np.ndarray, np.ndarray]:
    """The place of each token inside its document, and the number of the document inside its row.

    Args:
        cut: N windows of T + 1 tokens.

    Returns:
        positions (N, T) int32, 0 at the first token of the row and of every document; documents (N, T) int32, 0 for the
        first document of a row, then 1, 2, ...
    """
    count, length = cut.windows.shape[0], cut.windows.shape[1] - 1
    # An end after a row's last token makes a segment of length 0, which writes nothing.
    rows, columns = cut.rows, cut.columns
    ends_in_row = np.bincount(rows, minlength=count)
    before = np.cumsum(ends_in_row) - ends_in_row
    # A segment is what one document has in one row; segments are sorted, each row's first begins at column 0.
    starts = np.empty(count + len(rows), dtype=np.int64)
    numbers = np.zeros(count + len(rows), dtype=np.int32)
    heads = before + np.arange(count)
    starts[heads] = np.arange(count) * length
    own = np.arange(len(rows)) + rows + 1
    starts[own] = rows * length + columns
    numbers[own] = np.arange(len(rows)) - before[rows] + 1
    lengths = np.diff(starts, append=count * length)
    begins = np.repeat(starts.astype(np.int32), lengths)
    positions = np.subtract(np.arange(count * length, dtype=np.int32), begins, out=begins)
    return positions.reshape(count, length), np.repeat(numbers, lengths).reshape(count, length)


def refuse_short(source: Source, label: str, length: int) -> None:
    """Refuses a corpus that has no full row.

    Raises:
        DataError: with the numbers.
    """
    if source.tokens <= length:
        raise DataError(
            f"source {label!r} ({source.name}) has {source.tokens} tokens, fewer than the {length + 1} of one sample "
            f"(sequence_length = {length} and the last label); give it more text or lower data.sequence_length"
        )
