"""A corpus of documents in parts. A part is plain data that describes what to read, so any process can read any part.

The parts depend only on the corpus, not on its readers. So a prepared store is the same for any number of workers, and a
killed preparation can be resumed. A document is text, or a list of token ids, in a field of a record; `text_of` and `ids_of`
validate the field.
"""

from codecs import BOM_UTF16_BE, BOM_UTF16_LE, BOM_UTF32_BE, BOM_UTF32_LE
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from forge_core.errors import DataError
from forge_data.storage.checksums import digest_of
from forge_data.storage.files import File

Document = tuple[str, "str | np.ndarray"]
"""Name, and text or token ids."""
_READERS = {
    "text": "forge_data.sources.text",
    "jsonl": "forge_data.sources.jsonl",
    "columns": "forge_data.sources.columns",
    "huggingface": "forge_data.sources.huggingface",
}
"""Modules by name. Fingerprints and stored jobs contain these names, so they must not change."""
SHOWN = 10
"""Number of broken records that messages list; a file lists the others."""
LISTED = 100_000
"""Maximum number of broken records that the file lists."""
_LARGEST = np.iinfo(np.int64).max
_WIDE = ((BOM_UTF32_LE, "UTF-32"), (BOM_UTF32_BE, "UTF-32"), (BOM_UTF16_LE, "UTF-16"), (BOM_UTF16_BE, "UTF-16"))
"""Longer marks come first, because the mark of little-endian UTF-32 begins with that of UTF-16."""


@dataclass(frozen=True)
class CorpusPart:
    """Some documents of a corpus.

    Attributes:
        files: the files that hold the documents.
        start, stop: range in the files, in units of the reader: bytes, row groups, batches or rows; -1 is the end.
        size: approximate bytes of input, for progress.
    """

    files: tuple[File, ...]
    start: int
    stop: int
    size: int


@dataclass(frozen=True)
class Wanted:
    """The field and the split that are read from every record.

    Attributes:
        reader: a key of `_READERS`, or the full name of a module with a function `read(part, wanted, skips)`.
        column: column or key whose value is text, or a list of token ids.
        ids: whether the value is a list of token ids.
        split, held_out: see `in_split`.
        options: options of the reader; must be valid JSON.
    """

    reader: str
    column: str = "text"
    ids: bool = False
    split: str = "all"
    held_out: float = 0.05
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Skips:
    """Counts skipped records; more than `budget` broken records are an error.

    Attributes:
        budget: maximum number of broken records.
        count: number of broken records so far.
        messages: one message for each of the first `LISTED` skipped records: its name and the reason.
    """

    budget: int = 0
    count: int = 0
    messages: list[str] = field(default_factory=list)

    def broken(self, message: str) -> None:
        """Counts a broken record.

        Raises:
            DataError: there are more than `budget`; the message lists this record and the first ones before it.
        """
        self.count += 1
        if self.count > self.budget:
            allowed = f"it is broken record {self.count}, and `skip` allows {self.budget}"
            remedy = allowed if self.budget else "correct or remove it, or allow broken records with `skip`"
            others = "".join(f"\n  before it: {other}" for other in self.messages[:SHOWN])
            raise DataError(f"{message}; {remedy}{others}")
        self.left_out(message)

    def left_out(self, message: str) -> None:
        """Lists a record that is skipped on purpose."""
        if len(self.messages) < LISTED:
            self.messages.append(message)


def name_skipped(what: str, messages: Sequence[str], store: Path, report: Callable[[str], None]) -> None:
    """Reports the first skipped records, and writes the names of all of them to a file next to the store.

    Args:
        what: number and kind of the records, such as "3 broken records".
        messages: see `Skips`.
        store: path of the store.
        report: called with messages.

    Raises:
        OSError: the file cannot be written.
    """
    path = skipped_file(store)
    path.write_text("".join(f"{' '.join(message.splitlines())}\n" for message in messages), encoding="utf-8", errors="replace")
    report(f"left out {what}; the first: {messages[0]}")
    for message in messages[1:SHOWN]:
        report(f"left out {message}")
    report(f"{path} lists everything that was left out")


def skipped_file(store: Path) -> Path:
    """Returns the path of the file next to a store that lists its skipped records."""
    return store.with_name(f"{store.name}.skipped.txt")


class RecordReader(Protocol):
    """A module that reads documents of one format."""

    def read(self, part: CorpusPart, wanted: Wanted, skips: Skips, /) -> Iterator[Document]: ...


class Records:
    """Documents in parts, as `Texts`.

    Attributes:
        what: name for messages.
        bytes: total size of all files.
        skip: maximum number of broken records that are skipped.
    """

    def __init__(
        self,
        files: Sequence[File],
        wanted: Wanted,
        what: str,
        cut: Callable[[Sequence[File], int], list[CorpusPart]],
        skip: int = 0,
        identity: str = "",
    ) -> None:
        self.files = tuple(files)
        self.wanted = wanted
        self.what = what
        self.skip = skip
        self.bytes = sum(file.size for file in self.files)
        self._cut = cut
        self._identity = f"{wanted!r} {identity}"
        self._fingerprint: str | None = None

    @property
    def fingerprint(self) -> str:
        """Digest of `wanted` and of names, sizes and content of the files; see `checksums.digest_of`."""
        if self._fingerprint is None:
            self._fingerprint = digest_of(self.files, self._identity)
        return self._fingerprint

    def parts(self, size: int) -> list[CorpusPart]:
        """Returns all parts in order, each of about `size` bytes of input."""
        return self._cut(self.files, size)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Yields (name, text) of every document.

        Raises:
            DataError: a record is broken, or the records hold ids, not text.
        """
        if self.wanted.ids:
            raise DataError(f"{self.what} holds token ids, not text; a tokenizer cannot be trained on it")
        skips = Skips(self.skip)
        for part in self.parts(1 << 26):
            for name, text in read_part(part, self.wanted, skips):
                assert isinstance(text, str)
                yield name, text


def read_part(part: CorpusPart, wanted: Wanted, skips: Skips) -> Iterator[Document]:
    """Yields the documents of one part that are in the split and not empty.

    Raises:
        DataError: a record is broken; the message names it.
    """
    reader: RecordReader = import_module(_READERS.get(wanted.reader, wanted.reader))  # type: ignore[assignment]
    for name, content in reader.read(part, wanted, skips):
        if len(content) and in_split(name, wanted.split, wanted.held_out):
            yield name, content


def in_split(name: str, split: str, held_out: float) -> bool:
    """Whether a document belongs to a split, by a hash of its name: new documents do not move others between splits."""
    if split == "all":
        return True
    place = int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") / 2**64
    return (place < held_out) == (split == "held_out")


def grouped(files: Iterable[File], size: int) -> list[CorpusPart]:
    """Returns parts of whole files; a part takes files until it reaches `size` bytes."""
    parts: list[CorpusPart] = []
    group: list[File] = []
    for file in files:
        group.append(file)
        if sum(member.size for member in group) >= size:
            parts.append(CorpusPart(tuple(group), 0, len(group), sum(member.size for member in group)))
            group = []
    if group:
        parts.append(CorpusPart(tuple(group), 0, len(group), sum(member.size for member in group)))
    return parts


def checked_value(value: Any, place: Callable[[], str], wanted: Wanted, skips: Skips) -> "str | np.ndarray | None":
    """Returns the value of a record's field as text or ids, or None if the record is broken and skipped.

    Args:
        value: value of the field.
        place: returns the place of the record for messages; called only if the record is broken.
        wanted: describes the field.
        skips: counts broken records.

    Raises:
        DataError: the record is broken, and no further record may be skipped.
    """
    content, fault = ids_of(value) if wanted.ids else text_of(value)
    if fault:
        skips.broken(f"{place()}: {wanted.column!r} {fault}")
    return content


def text_of(value: Any) -> tuple[str | None, str]:
    """Returns (text, ""), or (None, fault).

    A lone surrogate is a fault: JSON can contain one, but UTF-8 cannot encode it.
    """
    if isinstance(value, bytes):  # a text column with invalid UTF-8, or a bytes column
        try:
            value.decode("utf-8")
        except UnicodeDecodeError as error:
            return None, f"is not UTF-8: {error.reason} at byte {error.start}"
    if not isinstance(value, str):
        return None, f"is {_kind(value)}, not text"
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            return None, f"holds the lone surrogate U+{ord(value[error.start]):04X} at character {error.start}"
    return value, ""


def ids_of(value: Any) -> tuple[np.ndarray | None, str]:
    """Returns ((n,) int64 token ids, ""), or (None, fault). `value` is a list or an array of integers."""
    if isinstance(value, list):
        if set(map(type, value)) - {int}:
            index = next(index for index, item in enumerate(value) if type(item) is not int)
            what = "a null" if value[index] is None else _kind(value[index])
            return None, f"holds {what} at index {index}, not a token id"
        try:
            ids = np.array(value, dtype=np.int64)
        except OverflowError:
            return None, _outside(next(item for item in enumerate(value) if abs(item[1]) > _LARGEST))
    elif isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "ui":
        if value.dtype.kind == "u" and len(value) and int(value.max()) > _LARGEST:
            index = int(value.argmax())
            return None, _outside((index, int(value[index])))
        ids = value.astype(np.int64)
    else:
        return None, f"is {_kind(value)}, not a list of token ids"
    if len(ids) and int(ids.min()) < 0:
        index = int(ids.argmin())
        return None, _outside((index, int(ids[index])))
    return ids, ""


def wide_encoding(head: bytes) -> str | None:
    """Returns UTF-16 or UTF-32 if a file begins with its byte order mark, else None."""
    return next((name for mark, name in _WIDE if head.startswith(mark)), None)


def _outside(item: tuple[int, int]) -> str:
    index, number = item
    if number < 0:
        return f"holds the negative id {number} at index {index}"
    return f"holds {number} at index {index}, larger than any token id"


def _kind(value: Any) -> str:
    return "missing or null" if value is None else f"a {type(value).__name__}"


def part_as_json(part: CorpusPart) -> dict[str, Any]:
    """Returns a part as JSON; `part_from_json` reads it."""
    return asdict(part)


def part_from_json(content: dict[str, Any]) -> CorpusPart:
    """Returns the part that `part_as_json` wrote."""
    files = tuple(File(**file) for file in content["files"])
    return CorpusPart(files, content["start"], content["stop"], content["size"])
