"""JSON lines, plain or compressed with gzip or zstandard: one object a line."""

import gzip
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, cast

from forge_core.errors import DataError
from forge_data.sources import zstd
from forge_data.sources.files import File
from forge_data.sources.parts import Document, Part, Skips, Wanted, checked

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst", ".ndjson")


def cut(files: Sequence[File], size: int) -> list[Part]:
    """Ranges of bytes; a line belongs to the range in which it begins. Compressed files cannot be entered midway."""
    found = []
    for file in files:
        step = file.size if _compressed(file) else size
        found += [
            Part((file,), start, min(start + step, file.size), min(step, file.size - start))
            for start in range(0, file.size, step or 1)
        ]
    return found


def read(part: Part, wanted: Wanted, skips: Skips) -> Iterator[Document]:
    """See `parts.Reader`. A document is named by its file and the byte (uncompressed) at which its line begins."""
    (file,) = part.files
    for offset, line in _lines(file, part):
        record = _record(file, offset, line, wanted.column, skips)
        if record is None:
            continue
        found = checked(record.get(wanted.column), f"{file.where} at byte {offset}", wanted, skips)
        if found is not None:
            yield f"{file.name}:{offset}", found


def records(file: File) -> Iterator[tuple[int, dict[str, Any]]]:
    """(offset, object) of every line of a file.

    Raises:
        DataError: a line is no object.
    """
    skips = Skips()
    for offset, line in _lines(file, Part((file,), 0, file.size, file.size)):
        record = _record(file, offset, line, None, skips)
        assert record is not None, "nothing is skipped"
        yield offset, record


def _record(file: File, offset: int, line: bytes, key: str | None, skips: Skips) -> dict[str, Any] | None:
    """A line's object, or None when it is broken and may be skipped."""
    try:
        record = json.loads(line)
    except ValueError as error:  # also what is not UTF-8
        skips.broken(f"{file.where} at byte {offset} is no line of JSON: {error}")
        return None
    if not isinstance(record, dict):
        skips.broken(f"{file.where} at byte {offset} is no JSON object" + (f" with a key {key!r}" if key else ""))
        return None
    return record


def _lines(file: File, part: Part) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of the lines that begin inside the part and are not blank."""
    compressed = _compressed(file)
    offset = 0
    with _opened(file) as content:
        if part.start and not compressed:
            content.seek(part.start - 1)
            offset = part.start - 1 + len(content.readline())  # the rest of a line that began before
        while compressed or part.stop < 0 or offset < part.stop:
            try:
                line = content.readline()
            except (EOFError, OSError, ValueError) as error:
                raise DataError(
                    f"{file.where} is damaged after byte {offset} of its content: {error}; restore the file"
                ) from error
            if not line:
                return
            if not line.isspace():
                yield offset, line
            offset += len(line)


@contextmanager
def _opened(file: File) -> Iterator[IO[bytes]]:
    try:
        path = file.local()
        if file.where.endswith(".zst"):
            with path.open("rb") as raw, zstd.lines(raw, file.where) as content:
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
