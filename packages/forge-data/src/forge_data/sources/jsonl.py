"""Reads JSON lines, plain or compressed with gzip or zstandard: one object per line."""

import gzip
import io
import json
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, cast

from forge_core.errors import DataError
from forge_data.sources.records import CorpusPart, Document, Skips, Wanted, checked_value, wide_encoding
from forge_data.storage.files import File, local_path

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst", ".ndjson")
_BLOCK = 1 << 22
_ZSTD_BLOCK = 1 << 20


def cut(files: Sequence[File], size: int) -> list[CorpusPart]:
    """Returns byte ranges of about `size` bytes, and compressed files whole. A line belongs to the range where it begins."""
    parts = []
    for file in files:
        step = file.size if _compressed(file) else size
        parts += [
            CorpusPart((file,), start, min(start + step, file.size), min(step, file.size - start))
            for start in range(0, file.size, step or 1)
        ]
    return parts


def read(part: CorpusPart, wanted: Wanted, skips: Skips) -> Iterator[Document]:
    """See `records.RecordReader`. The name of a document is its file and the (uncompressed) byte offset of its line."""
    lines = _Lines(part)
    for line in lines:
        record = _record(line, wanted.column)
        if isinstance(record, str):
            skips.broken(f"{lines.place()} {record}")
            continue
        document = checked_value(record.get(wanted.column), lines.place, wanted, skips)
        if document is not None:
            yield f"{lines.file.name}:{lines.offset}", document


def objects(part: CorpusPart) -> Iterator[tuple[str, Callable[[], str], dict[str, Any] | str]]:
    """Yields (name, place, object) of every line of a part; for an invalid line, a message instead of the object.

    `place` returns the place of the newest line only.
    """
    lines = _Lines(part)
    for line in lines:
        yield f"{lines.file.name}:{lines.offset}", lines.place, _record(line)


def each_line(file: File) -> Iterator[tuple[int, str, dict[str, Any] | str]]:
    """Yields (offset, place, object) of every line; for an invalid line, a message instead of the object."""
    lines = _Lines(CorpusPart((file,), 0, file.size, file.size))
    for line in lines:
        yield lines.offset, lines.place(), _record(line)


def records(file: File) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (offset, object) of every line of a file.

    Raises:
        DataError: a line is not a JSON object.
    """
    for offset, place, record in each_line(file):
        if isinstance(record, str):
            raise DataError(f"{place} {record}")
        yield offset, record


def _record(line: bytes, key: str = "") -> dict[str, Any] | str:
    """Returns the object of a line, or a message that says why the line is invalid."""
    try:
        # Decoded here, because `loads` of bytes detects UTF-16 and accepts lone surrogates.
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # also what is not UTF-8
        return f"is not valid JSON: {_reason(error)}"
    if isinstance(record, dict):
        return record
    return f"is not a JSON object with a key {key!r}" if key else "is not a JSON object"


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):  # its own message counts lines within this line
        return f"{error.msg} at column {error.colno}"
    return "brackets are nested too deeply" if isinstance(error, RecursionError) else str(error)


class _Lines:
    """The non-blank lines that begin inside a part, without the byte order mark of the file.

    Attributes:
        file: the file of the part.
        offset: (uncompressed) byte offset of the newest line.
    """

    def __init__(self, part: CorpusPart) -> None:
        (self.file,) = part.files
        self.offset = self._first = self._number = 0
        self._part = part

    def __iter__(self) -> Iterator[bytes]:
        file, part, compressed = self.file, self._part, _compressed(self.file)
        offset = 0
        with _opened(file) as content:
            if part.start and not compressed:
                content.seek(part.start - 1)
                offset = part.start - 1 + len(content.readline())  # the rest of a line that began before
            self._first = offset
            while compressed or part.stop < 0 or offset < part.stop:
                try:
                    line = content.readline()
                except (EOFError, OSError, ValueError, zlib.error) as error:
                    raise DataError(
                        f"{file.where} is damaged after byte {offset} of its content: {error}; restore the file"
                    ) from error
                if not line:
                    return
                self.offset, self._number = offset, self._number + 1
                offset += len(line)
                if self.offset == 0:
                    line = self._without_mark(line)
                if line and not line.isspace():
                    yield line

    def place(self) -> str:
        """Returns file, byte and line number of the newest line, for messages. It counts all lines before the part: slow."""
        before, left = 0, self._first
        if left:
            with _opened(self.file) as content:
                while left > 0 and (block := content.read(min(left, _BLOCK))):
                    before, left = before + block.count(b"\n"), left - len(block)
        return f"{self.file.where} at byte {self.offset} (line {before + self._number})"

    def _without_mark(self, line: bytes) -> bytes:
        if encoding := wide_encoding(line):
            raise DataError(f"{self.file.where} is {encoding} text according to its byte order mark; convert it to UTF-8")
        return line.removeprefix(BOM_UTF8)


@contextmanager
def _opened(file: File) -> Iterator[IO[bytes]]:
    try:
        path = local_path(file)
        if file.where.endswith(".zst"):
            with path.open("rb") as raw, decompressed(raw, file.where) as content:
                yield content
        elif file.where.endswith(".gz"):
            with gzip.open(path) as content:
                yield cast(IO[bytes], content)
        else:
            with path.open("rb") as content:
                yield content
    except OSError as error:
        raise DataError(f"{file.where} cannot be read: {error}") from error


def _compressed(file: File) -> bool:
    return file.where.endswith((".gz", ".zst"))


def decompressed(raw: IO[bytes], where: str) -> io.BufferedReader:
    """Returns a reader of the decompressed content of an open zstandard file.

    Raises:
        DataError: zstandard is not installed.
    """
    try:
        import zstandard
    except ImportError as error:
        raise DataError(f"{where} needs zstandard; pip install 'forge-data[zstd]'") from error
    return io.BufferedReader(_Frames(raw, zstandard.ZstdDecompressor, zstandard.ZstdError), _ZSTD_BLOCK)


class _Frames(io.RawIOBase):
    """Decompresses frame after frame. Unlike the library's stream, it raises `ValueError` for a truncated last frame."""

    def __init__(self, raw: IO[bytes], decompressor: Any, error: type[Exception]) -> None:
        self._raw, self._decompressor, self._error = raw, decompressor, error
        self._frame: Any = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            rest = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
            data = rest or self._raw.read(_ZSTD_BLOCK)
            if not data:
                if self._frame is not None and not self._frame.eof:
                    raise ValueError("it ends inside a zstandard frame")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = self._decompressor().decompressobj()
            try:
                self._ready = self._frame.decompress(data)
            except self._error as error:
                raise ValueError(str(error)) from error
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count
