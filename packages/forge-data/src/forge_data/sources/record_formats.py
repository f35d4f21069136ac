"""Which files a source of records names, and who reads them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from forge_core.errors import DataError
from forge_data.components.sources import RecordComponent
from forge_data.sources import columns, jsonl
from forge_data.sources.parts import Part, Records, Wanted
from forge_data.storage.files import File, find


class Format(NamedTuple):
    """Suffixes of a format's files, the module that reads them, and how they are cut into parts."""

    suffixes: tuple[str, ...]
    reader: str
    cut: Callable[[Sequence[File], int], list[Part]]


FORMATS = {
    "jsonl": Format(jsonl.SUFFIXES, "jsonl", jsonl.cut),
    "parquet": Format(columns.PARQUET, "columns", columns.cut),
    "arrow": Format(columns.ARROW, "columns", columns.cut),
}


def records(component: RecordComponent, name: str) -> Records:
    """The documents of a component of format `name`.

    Raises:
        DataError: there is no such file, or only empty ones.
    """
    form = FORMATS[name]
    files = find(component.path, form.suffixes, name)
    if not any(file.size for file in files):
        raise DataError(f"{component.path} holds no record ({len(files)} empty files); is the path right?")
    wanted = Wanted(form.reader, component.ids or component.text, component.ids is not None, component.split, component.held_out)
    return Records(files, wanted, f"{component.path} ({component.split})", form.cut, component.skip)
