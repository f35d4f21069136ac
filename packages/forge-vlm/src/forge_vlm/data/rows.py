"""Reads the rows of files with records: JSON lines, a JSON list or object, and CSV tables."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forge_core.errors import DataError
from forge_data.sources.jsonl import each_line
from forge_data.storage.files import File, local_path
from forge_vlm.data.documents import BrokenRecord

Row = tuple[str, str, dict[str, Any] | BrokenRecord]
"""Name of a row, which is unique among the files of a source; its place for messages; and its values."""


def read_rows(file: File, key_field: str | None = None) -> Iterator[Row]:
    """Yields the rows of a file: a table if its name ends in `.csv`, one JSON value if in `.json`, and otherwise JSON lines.

    Args:
        file: file to read.
        key_field: see `read_json`.

    Raises:
        DataError: the file cannot be read, or is not of its format.
    """
    if file.name.endswith(".csv"):
        return read_table(file)
    return read_json(file, key_field) if file.name.endswith(".json") else read_lines(file)


def read_lines(file: File) -> Iterator[Row]:
    """Yields the objects of JSON lines; a row is named by its file and byte offset."""
    for offset, place, record in each_line(file):
        yield f"{file.name}:{offset}", place, record if isinstance(record, dict) else BrokenRecord(f"{place} {record}")


def read_json(file: File, key_field: str | None = None) -> Iterator[Row]:
    """Yields the records of a file that is one JSON list, such as those of LLaVA.

    Args:
        file: file to read.
        key_field: reads one JSON object instead, such as Perception Test's, whose values are the records; this field of a record
            receives its key.

    Raises:
        DataError: the file cannot be read, or is neither a list nor, with `key_field`, an object.
    """
    try:
        records = json.loads(local_path(file).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise DataError(f"{file.where} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        why = "brackets are nested too deeply" if isinstance(error, RecursionError) else error
        raise DataError(f"{file.where} is not valid JSON: {why}") from error
    if key_field is not None:
        if not isinstance(records, dict):
            raise DataError(f"{file.where} is not a JSON object, so its records have no keys for the field {key_field!r}")
        records = [record | {key_field: key} if isinstance(record, dict) else record for key, record in records.items()]
    if not isinstance(records, list):
        raise DataError(f"{file.where} is neither JSON lines nor a JSON list of records; convert it to one of them")
    for number, record in enumerate(records):
        place = f"{file.where}, record {number + 1}"
        good = isinstance(record, dict)
        yield f"{file.name}:{number}", place, record if good else BrokenRecord(f"{place} is not a JSON object")


def read_table(file: File) -> Iterator[Row]:
    """Yields the rows of a CSV file with a header, as text by column.

    Raises:
        DataError: the file is not valid CSV.
    """
    table = _lines_of_table(file)
    _, head = next(table, (0, []))
    for number, (line, values) in enumerate(table):
        place = f"{file.where}, row {number + 1} (line {line})"
        row: dict[str, Any] | BrokenRecord = dict(zip(head, values, strict=False))
        if len(values) != len(head):
            row = BrokenRecord(f"{place} has {len(values)} columns, the header {len(head)}; quote text with commas")
        elif any("\udc80" <= letter <= "\udcff" for value in values for letter in value):
            row = BrokenRecord(f"{place} is not UTF-8")
        yield f"{file.name}:{number}", place, row


def columns_of(file: File) -> list[str]:
    """Returns the columns of a CSV file.

    Raises:
        DataError: the file is not valid CSV, or has no rows.
    """
    table = _lines_of_table(file)
    _, head = next(table, (0, []))
    if next(table, None) is None:
        raise DataError(f"{file.where} has no rows")
    return head


def _lines_of_table(file: File) -> Iterator[tuple[int, list[str]]]:
    """Yields (line of the last character, values) of the header and of each row."""
    path: Path = local_path(file)
    with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as content:
        reader = csv.reader(content)
        try:
            yield from ((reader.line_num, values) for values in reader if values)
        except csv.Error as error:
            raise DataError(f"{file.where} is not valid CSV after line {reader.line_num}: {error}") from error
