"""Reads labeled texts, or pairs of texts, from records: JSON lines, JSON lists, Parquet and Arrow, plain or compressed.

A label is the name of a class, or its number. If names are numbers themselves, such as those of ratings, an integer is a name: 3
is "3", wherever that is in the list. The names of a source are its key `labels`; the number of a class is its place there.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from forge_core.errors import DataError
from forge_data.chat.records import SUFFIXES, cut, rows
from forge_data.sources.records import CorpusPart, Records, Skips, Wanted, in_split, text_of
from forge_data.storage.files import find

READER = "forge_data.chat.labeled"
"""Name of this module in `Wanted`; fingerprints contain it."""


def open_labeled(
    path: str,
    labels: Sequence[str],
    *,
    text: str = "text",
    pair: str | None = None,
    separator: str = "\n",
    label: str = "label",
    split: str = "all",
    held_out: float = 0.05,
    skip: int = 0,
) -> Records:
    """Opens the records at a path.

    Args:
        path: a file, directory, pattern, or URL of these.
        labels: names of the classes.
        text, label: keys of the text and of its label.
        pair: key of a second text, which follows `separator`; None without one.
        separator: text between the two.
        split, held_out: see `in_split`.
        skip: maximum number of broken records.

    Raises:
        DataError: there is no file, or all files are empty.
    """
    files = find(path, SUFFIXES, "labeled text")
    if not any(file.size for file in files):
        raise DataError(f"{path} has no records: all {len(files)} files are empty; check the path")
    options: dict[str, Any] = {"labels": list(labels), "label": label}
    options |= {} if pair is None else {"pair": pair, "separator": separator}
    return Records(files, Wanted(READER, text, False, split, held_out, options), f"{path} ({split})", cut, skip)


def labeled(part: CorpusPart, wanted: Wanted, skips: Skips) -> Iterator[tuple[str, str, int]]:
    """Yields (name, text, number of the label) of every record of a part that is in the split.

    Raises:
        DataError: more records are broken than `skips` allows.
    """
    numbers = {name: number for number, name in enumerate(wanted.options["labels"])}
    columns = [wanted.column, *([wanted.options["pair"]] if "pair" in wanted.options else [])]
    for name, place, record in rows(part):
        if not in_split(name, wanted.split, wanted.held_out):
            continue
        fault = record if isinstance(record, str) else "is not an object" if not isinstance(record, dict) else ""
        texts: list[str] = []
        number = 0
        if isinstance(record, dict):
            for column in columns:
                text, why = text_of(record[column]) if column in record else (None, "is missing")
                why = why or ("" if text and not text.isspace() else "is empty")
                fault = fault or (f"{column!r} {why}" if why else "")
                texts.append(text or "")
            number, why = number_of(record.get(wanted.options["label"]), numbers)
            fault = fault or (f"{wanted.options['label']!r} {why}" if why else "")
        if fault:
            skips.broken(f"{place()}: {fault}")
            continue
        yield name, wanted.options.get("separator", "").join(texts), number


def number_of(value: Any, numbers: dict[str, int]) -> tuple[int, str]:
    """Returns (number, "") of a label, or (0, fault). `numbers` are those of the names, in their order."""
    if value is None:
        return 0, "is missing: each record needs a label"
    if type(value) not in (str, int):
        return 0, f"is {type(value).__name__}, neither the name of a label nor its number"
    spelled = type(value) is int and any(name.lstrip("-").isdigit() for name in numbers)
    if type(value) is int and not spelled:
        if 0 <= value < len(numbers):
            return value, ""
        return 0, f"is {value}, but there are {len(numbers)} labels, numbered from 0; correct it, or list all labels in `labels`"
    if (number := numbers.get(str(value))) is None:
        return 0, f"is {value!r}, which is none of the labels {', '.join(numbers)}; correct it, or add it to `labels`"
    return number, ""


def portions(part: CorpusPart, wanted: Wanted, skips: Skips, size: int) -> Iterator[tuple[list[str], list[int]]]:
    """Yields the texts and the numbers of their labels, in portions of about `size` characters."""
    texts: list[str] = []
    numbers: list[int] = []
    count = 0
    for _, text, number in labeled(part, wanted, skips):
        texts.append(text)
        numbers.append(number)
        count += len(text)
        if count >= size:
            yield texts, numbers
            texts, numbers, count = [], [], 0
    if texts:
        yield texts, numbers


def read(part: CorpusPart, wanted: Wanted, skips: Skips) -> Iterator[tuple[str, str]]:
    """See `records.RecordReader`: the texts without their labels, as for a tokenizer that learns from them."""
    for name, text, _ in labeled(part, wanted, skips):
        yield name, text
