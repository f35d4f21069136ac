"""The `Packing` protocol, the packing that cuts rows from the stream of documents, and the positions of tokens in documents.

A packing has `rows`, and its `cut` returns the windows of some rows and the document ends inside them. `ConcatenatedPacking`
cuts every T tokens: row i is tokens [i T, (i + 1) T) of the stream plus one more token, the last label. A document that is cut
continues in the next row as a separate document. Packings that keep documents whole are in `plan`.
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
        columns: (K,) int64 column of each document end, 1 <= column <= T: token `column` of the window begins a new document.
        filled: (N,) int64 number of tokens of each row, followed by padding; None if every row is full.
        learned: (N, T + 1) bool, whether each token is predicted; None if all are.
        classes: (N, T + 1) uint8, for labeled texts: 1 + the label of the document of each token, 0 without one; None otherwise.
    """

    windows: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    filled: np.ndarray | None = None
    learned: np.ndarray | None = None
    classes: np.ndarray | None = None


class Packing(Protocol):
    """Rows of one source.

    Attributes:
        rows: number of rows for training.
        ragged: number of rows for evaluation: one more if the last row is short.
    """

    source: Source
    length: int
    rows: int
    ragged: int

    def cut(self, numbers: np.ndarray) -> RowWindows:
        """Returns the windows of rows `numbers` (N,) int64, each below `rows`."""
        ...

    def cut_last(self) -> tuple[RowWindows, int]:
        """Returns the short last row, padded with token 0, and its number of columns with a label."""
        ...

    def token_at(self, number: int, column: int) -> int:
        """Returns the position in the source of the token in a column of a row, for messages."""
        ...

    def items(self, number: int) -> list[tuple[int, int]]:
        """Returns the ranges [first, stop) of a row's items in order, for a source with items."""
        ...


class ConcatenatedPacking:
    """Rows of T tokens cut from one source, back to back.

    Attributes:
        rows: number of full rows; a rest of fewer than T + 1 tokens is left out.
        ragged: number of rows including a short last row, for evaluation.
    """

    def __init__(self, source: Source, length: int) -> None:
        self.source = source
        self.length = length
        self.rows = max(0, (source.tokens - 1) // length)
        self.ragged = -(-max(0, source.tokens - 1) // length)

    def cut(self, numbers: np.ndarray) -> RowWindows:
        """Returns the windows of full rows `numbers` (N,) int64."""
        starts = numbers * self.length
        rows, columns = self.source.borders(starts.astype(np.uint64), self.length)
        return RowWindows(self.source.windows(starts, self.length + 1), rows, columns)

    def token_at(self, number: int, column: int) -> int:
        """Returns the position in the source of the token in a column of a row."""
        return number * self.length + column

    def items(self, number: int) -> list[tuple[int, int]]:
        """Returns no items: sources with items do not use this packing."""
        return []

    def cut_last(self) -> tuple[RowWindows, int]:
        """Returns the short last row, padded with token 0, and its number of columns with a label."""
        start = self.rows * self.length
        ids = self.source.read(start, self.source.tokens)
        windows = np.zeros((1, self.length + 1), dtype=ids.dtype)
        windows[0, : len(ids)] = ids
        columns = (self.source.ends(start, self.source.tokens) - np.uint64(start)).astype(np.int64)
        return RowWindows(windows, np.zeros(len(columns), dtype=np.int64), columns), len(ids) - 1


def places(cut: RowWindows) -> tuple[np.ndarray, np.ndarray]:
    """Computes the position of each token in its document, and the number of the document in its row.

    Args:
        cut: N windows of T + 1 tokens.

    Returns:
        positions (N, T) int32, 0 at the first token of the row and of every document; documents (N, T) int32, 0 for the
        first document of a row, then 1, 2, ...
    """
    count, length = cut.windows.shape[0], cut.windows.shape[1] - 1
    # A document end after the last token of a row creates a segment of length 0, which writes nothing.
    rows, columns = cut.rows, cut.columns
    ends_in_row = np.bincount(rows, minlength=count)
    before = np.cumsum(ends_in_row) - ends_in_row
    # A segment is the part of one document in one row. Segments are sorted; the first of each row begins at column 0.
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
    """Refuses a source that has no full row.

    Raises:
        DataError: the source has too few tokens.
    """
    if source.tokens <= length:
        raise DataError(
            f"source {label!r} ({source.name}) has {source.tokens} tokens, fewer than the {length + 1} tokens of one sample "
            f"(sequence_length = {length}, plus the last label); add more text or lower data.sequence_length"
        )
