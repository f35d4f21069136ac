"""Packings that keep documents whole. A plan assigns documents to rows; it is computed once and memory-mapped.

A plan is a directory of three files and a description. Row r has pieces [firsts[r], firsts[r + 1]); piece p is tokens
[starts[p], starts[p] + lengths[p]) of the source. A piece is a whole document. A document longer than a row becomes several
pieces of one row each and a shorter last one, or one piece or none if `too_long` of the source says so. The two documents of a
preference pair are one piece. Documents are planned in portions, so that memory does not grow with the corpus.
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

from forge_core.errors import DataError
from forge_core.files import publish, sync_path
from forge_core.protocols.data import Source, SourceWithItems, SourceWithMask
from forge_data.packing.concatenation import RowWindows
from forge_data.sources.scan import place_of, refuse_falling
from forge_data.storage.shards import blocks_of
from forge_data.storage.workspace import Partial, locked

VERSION = 1
PORTION = 1 << 20
"""Number of documents that are planned together."""
_WINDOW = 1 << 24
_GOES_ON = np.uint32(1 << 31)
"""Flag in the length of a piece whose document continues in another row."""
_FILES = {"firsts": "<u8", "starts": "<u8", "lengths": "<u4"}


class PlannedPacking:
    """The rows of a plan as a `Packing`. Rows are padded with token 0, which has no label.

    Attributes:
        summary: number of documents, pieces, rows, tokens and truncated documents, and the fraction of padding.
    """

    def __init__(self, source: Source, length: int, path: Path) -> None:
        self.source = source
        self.pairs = _has_pairs(source)
        self._labeled = bool(getattr(source, "labels", ()))
        self.length = length
        self.summary: dict[str, Any] = json.loads((path / "plan.json").read_text(encoding="utf-8"))
        self.rows = self.ragged = int(self.summary["rows"])
        self._firsts, self._starts, self._lengths = (_mapped(path / name, dtype) for name, dtype in _FILES.items())
        self._refuse_damage()

    def cut(self, numbers: np.ndarray) -> RowWindows:
        """Returns the windows of rows `numbers` (N,) int64."""
        first, after = self._firsts[numbers].astype(np.int64), self._firsts[numbers + 1].astype(np.int64)
        counts = after - first
        rows = np.repeat(np.arange(len(numbers)), counts)
        heads = np.cumsum(counts) - counts
        pieces = np.arange(len(rows)) + np.repeat(first - heads, counts)
        stored = self._lengths[pieces]
        lengths = (stored & ~_GOES_ON).astype(np.int64)
        stops = np.cumsum(lengths)
        stops -= np.repeat((stops - lengths)[heads], counts)  # columns, restarting at 0 in each row
        windows, mask = self._read(rows, self._starts[pieces].astype(np.int64), stops - lengths, lengths, len(numbers))
        whole = stored < _GOES_ON
        ends = rows[whole], stops[whole]
        if self.pairs:
            ends = np.repeat(rows, 2), np.stack((stops - lengths + self._chosen(pieces), stops), axis=1).reshape(-1)
        learned, classes = (None, mask) if self._labeled else (mask, None)
        return RowWindows(windows, *ends, stops[heads + counts - 1], learned, classes)

    def _chosen(self, pieces: np.ndarray) -> np.ndarray:
        """Returns the length of the first document of each preference pair (N,) int64."""
        starts, lengths = self._starts[pieces].astype(np.int64), self._lengths[pieces].astype(np.int64)
        firsts = [
            self.source.ends(start, start + length)[0] for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        ]
        return np.array(firsts, dtype=np.int64) - starts

    def tokens_in(self, numbers: np.ndarray) -> int:
        """Returns the total number of tokens of rows `numbers` (N,) int64, without padding."""
        first, after = self._firsts[numbers].astype(np.int64), self._firsts[numbers + 1].astype(np.int64)
        heads = np.cumsum(after - first) - (after - first)
        pieces = np.arange(int((after - first).sum())) + np.repeat(first - heads, after - first)
        return int((self._lengths[pieces] & ~_GOES_ON).sum(dtype=np.int64))

    def items(self, number: int) -> list[tuple[int, int]]:
        """Returns the ranges [first, stop) of a row's items in order; empty for a source without items."""
        if not isinstance(self.source, SourceWithItems):
            return []
        pieces = slice(int(self._firsts[number]), int(self._firsts[number + 1]))
        starts = self._starts[pieces].astype(np.int64)
        stops = starts + (self._lengths[pieces] & ~_GOES_ON)
        first, after = self.source.items_before(starts), self.source.items_before(stops)
        return [(a, b) for a, b in zip(first.tolist(), after.tolist(), strict=True) if a < b]

    def cut_last(self) -> tuple[RowWindows, int]:
        """Never called, because a plan has no short last row."""
        raise AssertionError("a plan has no short last row")

    def token_at(self, number: int, column: int) -> int:
        """Returns the position in the source of the token in a column of a row."""
        pieces = slice(int(self._firsts[number]), int(self._firsts[number + 1]))
        stops = np.cumsum(self._lengths[pieces] & ~_GOES_ON)
        piece = min(int(np.searchsorted(stops, column, side="right")), len(stops) - 1)
        before = int(stops[piece - 1]) if piece else 0
        return int(self._starts[pieces][piece]) + column - before

    def _refuse_damage(self) -> None:
        """Compares the files with their description: completely, or in blocks if they are large.

        Raises:
            ValueError: the files do not match the description.
        """
        pieces = int(self.summary["pieces"])
        if (len(self._firsts), len(self._starts), len(self._lengths)) != (self.rows + 1, pieces, pieces):
            raise ValueError("the size of a file differs from when it was written")
        if int(self._firsts[0]) or int(self._firsts[-1]) != pieces:
            raise ValueError("its rows do not contain all pieces")
        for start, stop in blocks_of(self.rows, whole=False):
            firsts = self._firsts[start : stop + 1]
            if (firsts[1:] <= firsts[:-1]).any():
                raise ValueError("a row begins after the next one")
        for start, stop in blocks_of(pieces, whole=False):
            begins, lengths = self._starts[start:stop], self._lengths[start:stop] & ~_GOES_ON
            tokens = np.uint64(self.source.tokens)
            if int(lengths.max()) > self.length or ((begins > tokens) | (begins + lengths > tokens)).any():
                raise ValueError("a piece exceeds the row length or the tokens of the source")

    def _read(
        self, rows: np.ndarray, starts: np.ndarray, columns: np.ndarray, lengths: np.ndarray, count: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        read, tokens = self.source.read, self.source.tokens
        # A piece that fills a row also reads the token after it: the last label, if the document continues.
        stops = np.minimum(starts + lengths + (lengths == self.length), tokens)
        places = zip(rows.tolist(), columns.tolist(), starts.tolist(), stops.tolist(), strict=True)
        windows = np.zeros((count, self.length + 1), dtype=read(0, 1).dtype)
        masked = self.source if isinstance(self.source, SourceWithMask) else None
        mask = None if masked is None else np.zeros(windows.shape, dtype=np.uint8 if self._labeled else bool)
        read_mask: Any = getattr(self.source, "classes" if self._labeled else "learned", None)
        for row, column, start, stop in places:
            windows[row, column : column + stop - start] = read(start, stop)
            if mask is not None:
                mask[row, column : column + stop - start] = read_mask(start, stop)
        return windows, mask


def planned(
    source: Source,
    length: int,
    mode: str,
    workspace: Path,
    label: str,
    most_items: int | None = None,
    too_long: str | None = None,
) -> PlannedPacking:
    """Returns the packing `best_fit` or `pad` of a source; the first call computes the plan.

    Args:
        source: the source to pack.
        length: tokens per row.
        mode: `best_fit` or `pad`.
        workspace: directory of the plan.
        label: label of the source.
        most_items: maximum number of items, such as images, per row.
        too_long: treatment of documents longer than a row: `error`, `skip`, `truncate`; None: continue in further rows.

    Raises:
        DataError: the workspace is not writable, its plan is damaged, or documents are too long.
    """
    limit = "" if most_items is None or not isinstance(source, SourceWithItems) else f"/{most_items}"
    limit += "" if too_long is None else f"/{too_long}"
    limit += "/pairs" if _has_pairs(source) else ""
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
        raise DataError(f"the pack plan {path} is damaged ({error}); remove it, and Forge computes it again") from error


def _has_pairs(source: Any) -> bool:
    """Whether documents 2 p and 2 p + 1 of a source are a preference pair, which stays in one row."""
    return bool(getattr(source, "pairs", False))


class TooLong(DataError):
    """A document is longer than a row, which the settings do not allow."""


class DocumentPieces(NamedTuple):
    """Pieces of some documents, in order.

    Attributes:
        starts, lengths: (N,) int64 start and length of each piece.
        goes_on: (N,) bool, whether the document continues in the next piece.
        documents: number of documents.
        left_out: number of documents longer than a row that are left out.
        cut: number of documents longer than a row that are cut or truncated.
    """

    starts: np.ndarray
    lengths: np.ndarray
    goes_on: np.ndarray
    documents: int
    left_out: int = 0
    cut: int = 0


def pieces_of(source: Source, length: int, portion: int = PORTION, too_long: str | None = None) -> Iterator[DocumentPieces]:
    """Yields the pieces of a source, portion by portion.

    Raises:
        TooLong: a document is longer than a row, and `too_long` is `error`.
    """
    done, begun, before = 0, 0, 0
    parts: list[np.ndarray] = []
    for start in range(0, source.tokens, _WINDOW):
        stop = min(start + _WINDOW, source.tokens)
        parts.append(source.ends(start, stop))
        done += len(parts[-1])
        if done < portion and stop < source.tokens:
            continue
        listed = np.concatenate(parts)
        refuse_falling(listed, begun, source)
        ends = listed.astype(np.int64)
        left: list[np.ndarray] = []
        if _has_pairs(source):
            left, ends = [listed[len(listed) // 2 * 2 :]], ends[1::2]
            if len(left[0]) and stop >= source.tokens:
                raise DataError(f"{source.name} has an odd number of documents, which are no preference pairs; prepare it again")
        if len(ends):
            begins = np.concatenate([[begun], ends[:-1]])
            if too_long == "error":
                _refuse_long(source, begins, ends, length, before)
            if too_long == "truncate" and isinstance(source, SourceWithMask):
                _refuse_untrained(source, begins, ends, length, before)
            yield _pieces(begins, ends, length, too_long)
            begun, before = int(ends[-1]), before + len(ends)
        done, parts = sum(map(len, left)), left


def _refuse_long(source: Source, begins: np.ndarray, ends: np.ndarray, length: int, before: int) -> None:
    sizes = ends - begins
    if int(sizes.max()) <= length:
        return
    first = int(np.argmax(sizes > length))
    name = _name(source, before + first, int(begins[first]))
    raise TooLong(
        f"{name} has {sizes[first]} tokens, but a row has {length}; shorten the document, raise data.sequence_length, or set "
        "too_long = 'skip' or 'truncate' in the source"
    )


def _refuse_untrained(source: SourceWithMask, begins: np.ndarray, ends: np.ndarray, length: int, before: int) -> None:
    """Refuses documents that have nothing to train on after they are truncated."""
    longer = np.flatnonzero(ends - begins > length).tolist()
    bare = [number for number in longer if not source.learned(int(begins[number]) + 1, int(begins[number]) + length).any()]
    if bare:
        name = _name(source, before + bare[0], int(begins[bare[0]]))
        raise TooLong(
            f"{name} has nothing to train on in its first {length} tokens, to which too_long = 'truncate' cuts it, and "
            f"neither have {len(bare) - 1} others of {len(longer)} longer documents; raise data.sequence_length, or set "
            "too_long = 'skip' in the source"
        )


def _name(source: Source, number: int, begin: int) -> str:
    """Returns the number and the name of a document, for messages."""
    name = getattr(source, "document_name", None)
    if _has_pairs(source):
        return f"preference pair {number + 1} ({name(2 * number) if callable(name) else place_of(source, begin)})"
    return f"document {number + 1} ({name(number) if callable(name) else place_of(source, begin)})"


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
            shutil.rmtree(path)  # incomplete: it has no plan.json
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
        raise TooLong(f"all of its {documents} documents are longer than a row of {length} tokens; raise data.sequence_length")
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
    """Returns the space in tokens that each piece occupies in a row of `capacity` tokens and at most `most` items.

    A piece occupies the larger of its share of the tokens and its share of the items, so the pieces of a row respect both
    limits.

    Raises:
        DataError: a document with items is longer than a row, or has more than `most` items.
    """
    if not isinstance(source, SourceWithItems):
        return lengths
    items = source.items_before(begins + lengths) - source.items_before(begins)
    if goes_on.any():
        piece = int(np.argmax(goes_on))
        where = place_of(source, int(begins[piece]))
        raise DataError(
            f"{source.name}: a document with more than {capacity} tokens ({where}) would be cut together with its images; raise "
            "data.sequence_length, or shorten the document"
        )
    if most is None:
        return lengths
    if (items > most).any():
        piece = int(np.argmax(items))
        raise DataError(
            f"{source.name}: a document ({place_of(source, int(begins[piece]))}) has {int(items[piece])} items, more than "
            f"data.items_per_row = {most}; raise it"
        )
    return np.maximum(lengths, -(-items * capacity // most))


def _mapped(path: Path, dtype: str) -> np.ndarray:
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Best-fit-decreasing: places the pieces in rows, longest first, each in the fullest row with enough room.

    Ding et al., "Fewer Truncations Improve Language Modeling" (2024), pack whole documents this way; Johnson (1974) proves
    that it uses at most 11/9 of the minimal number of rows, plus 4. Lengths are integers up to the capacity, so rows with equal
    room are interchangeable: all pieces of one length for rows with the same room are placed at once. The cost is that of
    sorting, plus a number of array operations that depends on the capacity but not on the number of pieces.

    Args:
        lengths: (N,) integers from 1 to `capacity`.
        capacity: tokens per row.

    Returns:
        (row of each piece (N,) int64, number of rows). Equal lengths are placed in the order of their numbers.
    """
    order = _descending(lengths, capacity)
    counts = np.bincount(lengths, minlength=capacity + 1)
    rows = np.empty(len(lengths), dtype=np.int64)
    room = _Room()
    used = start = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        stop = start + int(counts[length])
        while start < stop:
            free, open_rows = room.tightest(length)
            if open_rows is None:
                free = capacity
                open_rows = np.arange(used, used - (start - stop) // (capacity // length))  # as many as these pieces need
                used += len(open_rows)
            start = _place(order, rows, start, stop, length, free, open_rows, room)
    return rows, used


def _place(
    order: np.ndarray, rows: np.ndarray, start: int, stop: int, length: int, free: int, open_rows: np.ndarray, room: "_Room"
) -> int:
    """Places pieces order[start:stop], all of one length, in `open_rows`, all with `free` room; returns the next piece.

    After a row has taken a piece, it remains the tightest fit as long as another piece fits, so rows are filled one by one.
    """
    per_row = free // length
    taken = open_rows[: -((start - stop) // per_row)]
    placed = min(stop - start, len(taken) * per_row)
    rows[order[start : start + placed]] = np.repeat(taken, per_row)[:placed]
    in_last = placed - (len(taken) - 1) * per_row
    if len(open_rows) > len(taken):
        room.give_back(free, open_rows[len(taken) :])
    if in_last < per_row:
        room.add(free - in_last * length, taken[-1:])
        taken = taken[:-1]
    room.add(free - per_row * length, taken)
    return start + placed


class _Room:
    """Rows by their remaining room in tokens."""

    def __init__(self) -> None:
        self._rows: defaultdict[int, deque[np.ndarray]] = defaultdict(deque)
        self._some = 0  # bit r is set if a row has room r

    def tightest(self, length: int) -> tuple[int, np.ndarray | None]:
        """Removes and returns rows with the smallest room of at least `length`, as (room, rows)."""
        above = self._some >> length
        if not above:
            return 0, None
        free = length + (above & -above).bit_length() - 1
        rows = self._rows[free].popleft()
        if not self._rows[free]:
            self._some ^= 1 << free
        return free, rows

    def add(self, free: int, rows: np.ndarray) -> None:
        """Adds rows with this room."""
        if free and len(rows):
            self._rows[free].append(rows)
            self._some |= 1 << free

    def give_back(self, free: int, rows: np.ndarray) -> None:
        """Puts back removed rows that were not used, in front of others."""
        self._rows[free].appendleft(rows)
        self._some |= 1 << free


def _descending(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Returns the numbers of pieces by descending length, stably; numpy uses radix sort for 16 bits, which is much faster."""
    keys = capacity - lengths
    return np.argsort(keys.astype(np.uint16) if capacity <= 1 << 16 else keys, kind="stable")
