"""A corpus of documents in parts: plain data that says what to read, so that any process can read any part alone.

Which parts there are depends on the corpus only, never on who reads them. That makes a prepared store the same for any
number of workers, and a killed preparation resumable. A document is text, or a list of token ids, in a field of a record;
`text_of` and `ids_of` say what is wrong with a field that holds neither.
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
"""Modules by the names that fingerprints and stored jobs know them by; they must not change."""
SHOWN = 10
"""Broken records that messages name; a file names the others."""
LISTED = 100_000
"""Broken records that the file names at most."""
_LARGEST = np.iinfo(np.int64).max
_WIDE = ((BOM_UTF32_LE, "UTF-32"), (BOM_UTF32_BE, "UTF-32"), (BOM_UTF16_LE, "UTF-16"), (BOM_UTF16_BE, "UTF-16"))
"""The mark of UTF-32, little-endian, begins with that of UTF-16: longer ones come first."""


@dataclass(frozen=True)
class CorpusPart:
    """Some documents of a corpus.

    Attributes:
        files: that hold them.
        start, stop: what of them, in the units of the reader: bytes, row groups, batches or rows; -1 is the end.
        size: bytes of input, roughly: for progress.
    """

    files: tuple[File, ...]
    start: int
    stop: int
    size: int


@dataclass(frozen=True)
class Wanted:
    """What is taken from every record.

    Attributes:
        reader: a key of `_READERS`, or the full name of a module with a function `read(part, wanted, skips)`.
        column: column or key; its value is text, or a list of token ids.
        ids: whether it holds token ids.
        split, held_out: see `in_split`.
        options: of the reader, JSON as it stands.
    """

    reader: str
    column: str = "text"
    ids: bool = False
    split: str = "all"
    held_out: float = 0.05
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Skips:
    """Records that are left out. Those that are broken are counted, and more than `budget` are an error.

    Attributes:
        budget: broken records that may be left out.
        count: broken records so far.
        messages: of the first `LISTED` records that were left out; each names one and says why.
    """

    budget: int = 0
    count: int = 0
    messages: list[str] = field(default_factory=list)

    def broken(self, message: str) -> None:
        """Notes a broken record.

        Raises:
            DataError: there were too many; names this one and those before it.
        """
        self.count += 1
        if self.count > self.budget:
            so_far = f"; it is broken record {self.count}, and `skip` allows {self.budget}" if self.budget else ""
            others = "".join(f"\n  before it: {other}" for other in self.messages[:SHOWN])
            raise DataError(f"{message}{so_far}{others}")
        self.left_out(message)

    def left_out(self, message: str) -> None:
        """Notes a record that is left out on purpose."""
        if len(self.messages) < LISTED:
            self.messages.append(message)


def name_skipped(what: str, messages: Sequence[str], store: Path, report: Callable[[str], None]) -> None:
    """Reports the first records that were left out, and writes the names of all next to a store.

    Args:
        what: how many of what, such as "3 broken records".
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
    report(f"all that were left out are named in {path}")


def skipped_file(store: Path) -> Path:
    """The file next to a store that names the records that are not in it."""
    return store.with_name(f"{store.name}.skipped.txt")


class RecordReader(Protocol):
    """A module that reads documents of one format."""

    def read(self, part: CorpusPart, wanted: Wanted, skips: Skips, /) -> Iterator[Document]: ...


class Records:
    """Documents in parts, as `Texts`.

    Attributes:
        what: for messages.
        bytes: of all files together.
        skip: broken records that may be left out.
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
        """Of what is wanted, and of names, sizes and content of the files; see `checksums.digest_of`."""
        if self._fingerprint is None:
            self._fingerprint = digest_of(self.files, self._identity)
        return self._fingerprint

    def parts(self, size: int) -> list[CorpusPart]:
        """All parts in order, each of about `size` bytes of input."""
        return self._cut(self.files, size)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """(name, text) of every document.

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
    """The documents of one part that are in the wanted split; those without content are left out.

    Raises:
        DataError: a record is broken; says which.
    """
    reader: RecordReader = import_module(_READERS.get(wanted.reader, wanted.reader))  # type: ignore[assignment]
    for name, content in reader.read(part, wanted, skips):
        if len(content) and in_split(name, wanted.split, wanted.held_out):
            yield name, content


def in_split(name: str, split: str, held_out: float) -> bool:
    """Whether a document belongs to a split, by a hash of its name: adding others moves none."""
    if split == "all":
        return True
    place = int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") / 2**64
    return (place < held_out) == (split == "held_out")


def grouped(files: Iterable[File], size: int) -> list[CorpusPart]:
    """Parts of whole files; each takes files until it reaches `size` bytes."""
    found: list[CorpusPart] = []
    own: list[File] = []
    for file in files:
        own.append(file)
        if sum(one.size for one in own) >= size:
            found.append(CorpusPart(tuple(own), 0, len(own), sum(one.size for one in own)))
            own = []
    if own:
        found.append(CorpusPart(tuple(own), 0, len(own), sum(one.size for one in own)))
    return found


def checked_value(value: Any, place: Callable[[], str], wanted: Wanted, skips: Skips) -> "str | np.ndarray | None":
    """The value of a record's field as text or ids, or None when the record is broken and may be skipped.

    Args:
        value: of the field.
        place: names the record; asked only when it is broken.
        wanted: what is taken from records.
        skips: counts broken ones.

    Raises:
        DataError: it is broken and no more may be.
    """
    found, fault = ids_of(value) if wanted.ids else text_of(value)
    if fault:
        skips.broken(f"{place()}: {wanted.column!r} {fault}")
    return found


def text_of(value: Any) -> tuple[str | None, str]:
    """(text, "") or (None, what is wrong).

    A lone surrogate, which JSON can spell, is half a character: nothing can write it as UTF-8.
    """
    if isinstance(value, bytes):  # a column of text that is not valid UTF-8, or a column of bytes
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
    """((n,) int64 token ids, "") or (None, what is wrong). `value` is a list, or an array of integers of a column."""
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
    """UTF-16 or UTF-32, where a file begins with the byte order mark of one."""
    return next((name for mark, name in _WIDE if head.startswith(mark)), None)


def _outside(item: tuple[int, int]) -> str:
    index, number = item
    if number < 0:
        return f"holds the negative id {number} at index {index}"
    return f"holds {number} at index {index}, larger than any token id"


def _kind(value: Any) -> str:
    return "missing or null" if value is None else f"a {type(value).__name__}"


def part_as_json(part: CorpusPart) -> dict[str, Any]:
    """A part as JSON; `part_from_json` reads it."""
    return asdict(part)


def part_from_json(content: dict[str, Any]) -> CorpusPart:
    """The part that `as_json` wrote."""
    files = tuple(File(**file) for file in content["files"])
    return CorpusPart(files, content["start"], content["stop"], content["size"])
