"""Packings that keep documents whole: a plan, made once and memory-mapped, says which documents share a row.

A plan is a directory of three files and a description. Row r has pieces [firsts[r], firsts[r + 1]); piece p is tokens
[starts[p], starts[p] + lengths[p]) of the source. A piece is a whole document, or, of a document longer than a row, one
full row of it or what is left at its end; such a document has one piece or none where the source says so (`too_long`).
Documents are planned in portions, so that memory does not grow with the corpus.
"""

import json
import shutil
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from forge_core.durable_files import publish, sync_path
from forge_core.errors import DataError
from forge_core.protocols.data import Source, SourceWithItems
from forge_data.packing.concatenation import RowWindows
from forge_data.sources.scan import place_of, refuse_falling
from forge_data.storage.document_ends import blocks_of
from forge_data.storage.workspace import Partial, locked

VERSION = 1
PORTION = 1 << 20
"""Documents that are planned together."""
_WINDOW = 1 << 24
_GOES_ON = np.uint32(1 << 31)
"""Set in the length of a piece whose document goes on in another row."""
_FILES = {"firsts": "<u8", "starts": "<u8", "lengths": "<u4"}


class PlannedPacking:
    """The rows of a plan, as a `Packing`; rows that are not full are padded with token 0, which has no label.

    Attributes:
        summary: documents, pieces, rows, tokens, truncated documents, and the share of padding.
    """

    def __init__(self, source: Source, length: int, path: Path) -> None:
        self.source = source
        self.length = length
        self.summary: dict[str, Any] = json.loads((path / "plan.json").read_text(encoding="utf-8"))
        self.rows = self.ragged = int(self.summary["rows"])
        self._firsts, self._starts, self._lengths = (_mapped(path / name, dtype) for name, dtype in _FILES.items())
        self._refuse_damage()

    def cut(self, numbers: np.ndarray) -> RowWindows:
        """The windows of rows `numbers` (N,) int64."""
        first, after = self._firsts[numbers].astype(np.int64), self._firsts[numbers + 1].astype(np.int64)
        counts = after - first
        rows = np.repeat(np.arange(len(numbers)), counts)
        heads = np.cumsum(counts) - counts
        pieces = np.arange(len(rows)) + np.repeat(first - heads, counts)
        stored = self._lengths[pieces]
        lengths = (stored & ~_GOES_ON).astype(np.int64)
        stops = np.cumsum(lengths)
        stops -= np.repeat((stops - lengths)[heads], counts)  # columns, counted in each row anew
        windows, learned = self._read(rows, self._starts[pieces].astype(np.int64), stops - lengths, lengths, len(numbers))
        whole = stored < _GOES_ON
        return RowWindows(windows, rows[whole], stops[whole], stops[heads + counts - 1], learned)

    def tokens_in(self, numbers: np.ndarray) -> int:
        """Tokens of rows `numbers` (N,) int64 together, without padding."""
        first, after = self._firsts[numbers].astype(np.int64), self._firsts[numbers + 1].astype(np.int64)
        heads = np.cumsum(after - first) - (after - first)
        pieces = np.arange(int((after - first).sum())) + np.repeat(first - heads, after - first)
        return int((self._lengths[pieces] & ~_GOES_ON).sum(dtype=np.int64))

    def items(self, number: int) -> list[tuple[int, int]]:
        """Of a source with items: ranges [first, stop) of those in a row, in the order of their places."""
        if not isinstance(self.source, SourceWithItems):
            return []
        pieces = slice(int(self._firsts[number]), int(self._firsts[number + 1]))
        starts = self._starts[pieces].astype(np.int64)
        stops = starts + (self._lengths[pieces] & ~_GOES_ON)
        first, after = self.source.items_before(starts), self.source.items_before(stops)
        return [(a, b) for a, b in zip(first.tolist(), after.tolist(), strict=True) if a < b]

    def cut_last(self) -> tuple[RowWindows, int]:
        """Never needed: no row is left over."""
        raise AssertionError("a plan has no short last row")

    def token_at(self, number: int, column: int) -> int:
        """Where in the source the token in a column of a row lies."""
        pieces = slice(int(self._firsts[number]), int(self._firsts[number + 1]))
        stops = np.cumsum(self._lengths[pieces] & ~_GOES_ON)
        piece = min(int(np.searchsorted(stops, column, side="right")), len(stops) - 1)
        before = int(stops[piece - 1]) if piece else 0
        return int(self._starts[pieces][piece]) + column - before

    def _refuse_damage(self) -> None:
        """Compares the files with their description: all of them, or blocks of large ones.

        Raises:
            ValueError: they differ; says how.
        """
        pieces = int(self.summary["pieces"])
        if (len(self._firsts), len(self._starts), len(self._lengths)) != (self.rows + 1, pieces, pieces):
            raise ValueError("the size of a file differs from when it was written")
        if int(self._firsts[0]) or int(self._firsts[-1]) != pieces:
            raise ValueError("its rows do not hold all pieces")
        for start, stop in blocks_of(self.rows, whole=False):
            firsts = self._firsts[start : stop + 1]
            if (firsts[1:] <= firsts[:-1]).any():
                raise ValueError("a row begins behind the next one")
        for start, stop in blocks_of(pieces, whole=False):
            begins, lengths = self._starts[start:stop], self._lengths[start:stop] & ~_GOES_ON
            tokens = np.uint64(self.source.tokens)
            if int(lengths.max()) > self.length or ((begins > tokens) | (begins + lengths > tokens)).any():
                raise ValueError("a piece lies outside the tokens")

    def _read(
        self, rows: np.ndarray, starts: np.ndarray, columns: np.ndarray, lengths: np.ndarray, count: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        read, tokens = self.source.read, self.source.tokens
        # A piece that fills a row brings the token after it along: the last label, where the document goes on.
        stops = np.minimum(starts + lengths + (lengths == self.length), tokens)
        places = zip(rows.tolist(), columns.tolist(), starts.tolist(), stops.tolist(), strict=True)
        windows = np.zeros((count, self.length + 1), dtype=read(0, 1).dtype)
        illustrated = self.source if isinstance(self.source, SourceWithItems) else None
        learned = None if illustrated is None else np.zeros(windows.shape, dtype=bool)
        for row, column, start, stop in places:
            windows[row, column : column + stop - start] = read(start, stop)
            if illustrated is not None and learned is not None:
                learned[row, column : column + stop - start] = illustrated.learned(start, stop)
        return windows, learned


def planned(
    source: Source,
    length: int,
    mode: str,
    workspace: Path,
    label: str,
    most_items: int | None = None,
    too_long: str | None = None,
) -> PlannedPacking:
    """The packing `best_fit` or `pad` of a source; the plan is made the first time.

    Args:
        source: what is packed.
        length: tokens of a row.
        mode: `best_fit` or `pad`.
        workspace: where the plan is kept.
        label: of the source.
        most_items: how many items, such as images, the documents of one row may have together.
        too_long: what becomes of a longer document: `error`, `skip`, `truncate`; None: it goes on in further rows.

    Raises:
        DataError: the workspace cannot be written, a plan in it is damaged, a document fits no row, or none does.
    """
    limit = "" if most_items is None or not isinstance(source, SourceWithItems) else f"/{most_items}"
    limit += "" if too_long is None else f"/{too_long}"
    key = blake2b(f"{VERSION}/{source.fingerprint}/{length}/{mode}{limit}".encode(), digest_size=8).hexdigest()
    path = workspace / f"packed-{label}-{key}".replace("/", "-")
    if not (path / "plan.json").exists():
        with locked(workspace):
            if not (path / "plan.json").exists():
                try:
                    _write(source, length, mode, path, most_items, too_long)
                except TooLong as error:
                    raise TooLong(f"source {label!r}: {error}") from error
    try:
        return PlannedPacking(source, length, path)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"the pack plan {path} is damaged ({error}); remove it, and it is made again") from error


class TooLong(DataError):
    """A document is longer than a row, and must not be."""


class DocumentPieces(NamedTuple):
    """Pieces of some documents, in order.

    Attributes:
        starts, lengths: (N,) int64 of each piece.
        goes_on: (N,) bool, whether its document goes on in the next piece.
        documents: of which they are.
        left_out, cut: documents longer than a row that get no piece, and those whose end is cut off.
    """

    starts: np.ndarray
    lengths: np.ndarray
    goes_on: np.ndarray
    documents: int
    left_out: int = 0
    cut: int = 0


def pieces_of(source: Source, length: int, portion: int = PORTION, too_long: str | None = None) -> Iterator[DocumentPieces]:
    """Pieces of a source, portion by portion.

    Raises:
        TooLong: a document is longer than a row, and `too_long` is `error`.
    """
    done, begun, before = 0, 0, 0
    held: list[np.ndarray] = []
    for start in range(0, source.tokens, _WINDOW):
        stop = min(start + _WINDOW, source.tokens)
        held.append(source.ends(start, stop))
        done += len(held[-1])
        if done < portion and stop < source.tokens:
            continue
        listed = np.concatenate(held)
        refuse_falling(listed, begun, source)
        ends = listed.astype(np.int64)
        if len(ends):
            begins = np.concatenate([[begun], ends[:-1]])
            if too_long == "error":
                _refuse_long(source, begins, ends, length, before)
            yield _pieces(begins, ends, length, too_long)
            begun, before = int(ends[-1]), before + len(ends)
        done, held = 0, []


def _refuse_long(source: Source, begins: np.ndarray, ends: np.ndarray, length: int, before: int) -> None:
    sizes = ends - begins
    if int(sizes.max()) <= length:
        return
    first = int(np.argmax(sizes > length))
    number, name = before + first, getattr(source, "document_name", None)
    where = name(number) if callable(name) else place_of(source, int(begins[first]))
    raise TooLong(
        f"document {number + 1} ({where}) has {sizes[first]} tokens, and a "
        f"row has {length}; shorten it, raise data.sequence_length, or set too_long = 'skip' or 'truncate' in the source"
    )


def _pieces(begins: np.ndarray, ends: np.ndarray, length: int, too_long: str | None) -> DocumentPieces:
    sizes = ends - begins
    none = np.zeros(len(sizes), dtype=bool)
    if int(sizes.max()) <= length:
        return DocumentPieces(begins, sizes, none, len(sizes))
    longer = int((sizes > length).sum())
    if too_long == "skip":
        kept = sizes <= length
        return DocumentPieces(begins[kept], sizes[kept], none[kept], len(sizes), left_out=longer)
    if too_long == "truncate":
        return DocumentPieces(begins, np.minimum(sizes, length), none, len(sizes), cut=longer)
    counts = -(-sizes // length)
    document = np.repeat(np.arange(len(sizes)), counts)
    offsets = (np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)) * length
    left = sizes[document] - offsets
    return DocumentPieces(begins[document] + offsets, np.minimum(left, length), left > length, len(sizes), cut=longer)


def _write(source: Source, length: int, mode: str, path: Path, most_items: int | None, too_long: str | None) -> None:
    try:
        owned = Partial(path, directory=True)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}; choose another workspace") from error
    partial = owned.path
    try:
        summary = _write_files(source, length, mode, partial, most_items, too_long)
        (partial / "plan.json").write_text(json.dumps(summary), encoding="utf-8")
        for file in partial.iterdir():
            sync_path(file)
        if path.exists():
            shutil.rmtree(path)  # without plan.json: it is never read
        publish(partial, path)
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}; make room or choose another workspace") from error
    finally:
        owned.close()


def _write_files(
    source: Source, length: int, mode: str, folder: Path, most_items: int | None, too_long: str | None
) -> dict[str, Any]:
    rows = pieces = documents = truncated = left_out = tokens = 0
    with ExitStack() as stack:
        firsts, starts, sizes = (stack.enter_context((folder / name).open("wb")) for name in _FILES)
        firsts.write(np.zeros(1, dtype="<u8").tobytes())
        for begins, lengths, goes_on, count, out, cut in pieces_of(source, length, too_long=too_long):
            documents, left_out, truncated = documents + count, left_out + out, truncated + cut
            if not len(lengths):
                continue
            sizes_in_row = _with_items(source, begins, lengths, goes_on, length, most_items)
            row_of, used = best_fit(sizes_in_row, length) if mode == "best_fit" else (np.arange(len(lengths)), len(lengths))
            order = np.argsort(row_of, kind="stable")
            after = np.cumsum(np.bincount(row_of, minlength=used)) + pieces
            firsts.write(after.astype("<u8").tobytes())
            starts.write(begins[order].astype("<u8").tobytes())
            sizes.write((lengths.astype(np.uint32) | goes_on * _GOES_ON)[order].astype("<u4").tobytes())
            rows, pieces = rows + used, pieces + len(lengths)
            tokens += int(lengths.sum())
    if not rows:
        raise TooLong(f"each of its {documents} documents is longer than a row of {length} tokens; raise data.sequence_length")
    return {
        "version": VERSION,
        "packing": mode,
        "length": length,
        "documents": documents,
        "pieces": pieces,
        "rows": rows,
        "tokens": tokens,
        "truncated_documents": truncated,
        "left_out": left_out,
        "efficiency": tokens / (rows * length),
        "padding": 1 - tokens / (rows * length),
    }


def _with_items(
    source: Source, begins: np.ndarray, lengths: np.ndarray, goes_on: np.ndarray, capacity: int, most: int | None
) -> np.ndarray:
    """What each piece takes of a row of `capacity` tokens that also has room for `most` items.

    A piece takes the larger of its two shares, so what fits one row by this measure fits it by both.

    Raises:
        DataError: a document with items is longer than a row, or has more items than one may have.
    """
    if not isinstance(source, SourceWithItems):
        return lengths
    items = source.items_before(begins + lengths) - source.items_before(begins)
    if goes_on.any():
        piece = int(np.argmax(goes_on))
        where = place_of(source, int(begins[piece]))
        raise DataError(
            f"{source.name}: a document with more than {capacity} tokens ({where}) would be cut, and its images with it; raise "
            "data.sequence_length, or shorten it"
        )
    if most is None:
        return lengths
    if (items > most).any():
        piece = int(np.argmax(items))
        raise DataError(
            f"{source.name}: a document ({place_of(source, int(begins[piece]))}) has {int(items[piece])} items, and "
            f"data.items_per_row = {most}; raise it"
        )
    return np.maximum(lengths, -(-items * capacity // most))


def _mapped(path: Path, dtype: str) -> np.ndarray:
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Best-fit-decreasing: pieces of documents into rows, the longest first, each into the fullest row that it fits.

    Ding et al., "Fewer Truncations Improve Language Modeling" (2024), pack whole documents this way; Johnson (1974) shows
    that it uses at most 11/9 of the least number of rows, plus 4. Lengths are integers up to the capacity, so rows with equal
    room are interchangeable: all pieces of one length that go into rows with one amount of room are placed at once. The work
    is that of sorting plus a number of array operations that depends on the capacity and not on the number of pieces.

    Args:
        lengths: (N,) integers from 1 to `capacity`.
        capacity: tokens of a row.

    Returns:
        (rows (N,) int64, number of rows). Equal lengths are placed in the order of their numbers.
    """
    order = _descending(lengths, capacity)
    counts = np.bincount(lengths, minlength=capacity + 1)
    rows = np.empty(len(lengths), dtype=np.int64)
    room = _Room()
    used = start = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        stop = start + int(counts[length])
        while start < stop:
            free, found = room.tightest(length)
            if found is None:
                free = capacity
                found = np.arange(used, used - (start - stop) // (capacity // length))  # as many as these pieces need
                used += len(found)
            start = _place(order, rows, start, stop, length, free, found, room)
    return rows, used


def _place(
    order: np.ndarray, rows: np.ndarray, start: int, stop: int, length: int, free: int, found: np.ndarray, room: "_Room"
) -> int:
    """Puts pieces order[start:stop], all of one length, into rows `found`, all with `free` room; returns the next piece.

    A row that took one piece has the tightest fit for the next as long as that fits too, so rows are filled in turn.
    """
    each = free // length
    taken = found[: -((start - stop) // each)]
    placed = min(stop - start, len(taken) * each)
    rows[order[start : start + placed]] = np.repeat(taken, each)[:placed]
    left_over = placed - (len(taken) - 1) * each  # pieces in the last row
    if len(found) > len(taken):
        room.give_back(free, found[len(taken) :])
    if left_over < each:
        room.add(free - left_over * length, taken[-1:])
        taken = taken[:-1]
    room.add(free - each * length, taken)
    return start + placed


class _Room:
    """Rows by the room that is left in them."""

    def __init__(self) -> None:
        self._rows: defaultdict[int, deque[np.ndarray]] = defaultdict(deque)
        self._some = 0  # bit r is set where some row has room r

    def tightest(self, length: int) -> tuple[int, np.ndarray | None]:
        """The smallest room of at least `length` that a row has, and rows that have it; they are taken out."""
        above = self._some >> length
        if not above:
            return 0, None
        free = length + (above & -above).bit_length() - 1
        rows = self._rows[free].popleft()
        if not self._rows[free]:
            self._some ^= 1 << free
        return free, rows

    def add(self, free: int, rows: np.ndarray) -> None:
        """Notes rows that have this much room left."""
        if free and len(rows):
            self._rows[free].append(rows)
            self._some |= 1 << free

    def give_back(self, free: int, rows: np.ndarray) -> None:
        """Returns rows that were taken out and not used, so that they come first again."""
        self._rows[free].appendleft(rows)
        self._some |= 1 << free


def _descending(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Numbers of pieces by falling length, equal ones in order; 16 bits are sorted by radix, which is much faster."""
    keys = capacity - lengths
    return np.argsort(keys.astype(np.uint16) if capacity <= 1 << 16 else keys, kind="stable")
