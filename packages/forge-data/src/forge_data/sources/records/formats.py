"""Which files a source of records names, and who reads them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from forge_core.errors import DataError
from forge_data.sources.records import columns, jsonl
from forge_data.sources.records.parts import Part, Records, Wanted
from forge_data.storage.file import File
from forge_data.storage.files import find


class RecordFormat(NamedTuple):
    """Suffixes of a format's files, the module that reads them, and how they are cut into parts."""

    suffixes: tuple[str, ...]
    reader: str
    cut: Callable[[Sequence[File], int], list[Part]]


RECORD_FORMATS = {
    "jsonl": RecordFormat(jsonl.SUFFIXES, "jsonl", jsonl.cut),
    "parquet": RecordFormat(columns.PARQUET, "columns", columns.cut),
    "arrow": RecordFormat(columns.ARROW, "columns", columns.cut),
}


def open_records(
    path: str,
    format: str,  # noqa: A002 (the field's term)
    *,
    text: str = "text",
    ids: str | None = None,
    split: str = "all",
    held_out: float = 0.05,
    skip: int = 0,
) -> Records:
    """The documents in files of records.

    Args:
        path: a file, directory, pattern or URL.
        format: a key of `FORMATS`.
        text: field of the text.
        ids: field of a list of token ids, which is read instead of the text.
        split, held_out: see `in_split`.
        skip: broken records that may be left out.

    Raises:
        DataError: the format is unknown, the file does not exist, or all files are empty.
    """
    if format not in RECORD_FORMATS:
        raise DataError(f"record format {format!r} is unknown; known: {', '.join(RECORD_FORMATS)}")
    form = RECORD_FORMATS[format]
    files = find(path, form.suffixes, format)
    if not any(file.size for file in files):
        raise DataError(f"{path} has no records ({len(files)} empty files); check the path")
    wanted = Wanted(form.reader, ids or text, ids is not None, split, held_out)
    return Records(files, wanted, f"{path} ({split})", form.cut, skip)
