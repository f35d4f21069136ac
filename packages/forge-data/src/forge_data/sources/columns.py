"""Reads one column of Parquet and Arrow files: texts, or lists of token ids."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_core.errors import DataError
from forge_data.sources.records import CorpusPart, Document, Skips, Wanted, checked_value
from forge_data.storage.files import File, local_path

if TYPE_CHECKING:
    import pyarrow as pa

PARQUET = (".parquet",)
ARROW = (".arrow", ".feather")
_ROWS = 1024


def cut(files: Sequence[File], size: int) -> list[CorpusPart]:
    """Returns parts of about `size` bytes: consecutive row groups of a Parquet file, or record batches of an Arrow file."""
    parts = []
    for file in files:
        with _opened(file) as content:
            groups = content.groups
        step = max(1, round(groups * size / max(1, file.size)))
        for start in range(0, groups, step):
            stop = min(start + step, groups)
            parts.append(CorpusPart((file,), start, stop, file.size * (stop - start) // groups))
    return parts


def read(part: CorpusPart, wanted: Wanted, skips: Skips) -> Iterator[Document]:
    """See `records.RecordReader`. The name of a document is its file, group, and row in the group."""
    (file,) = part.files
    with _opened(file) as content:
        if wanted.column not in content.names:
            raise DataError(f"{file.where} has no column {wanted.column!r}; it has {', '.join(content.names)}")
        for group in range(part.start, content.groups if part.stop < 0 else part.stop):
            row = 0
            for values in content.column(group, wanted.column):
                for value in values:
                    name = f"{file.name}:{group}:{row}"
                    document = checked_value(value, partial(_place, file, group, row), wanted, skips)
                    row += 1
                    if document is not None:
                        yield name, document


def objects(part: CorpusPart) -> Iterator[tuple[str, Callable[[], str], dict[str, Any]]]:
    """Yields (name, place, record) of every row of a part, with all columns and without null fields.

    Null fields are left out at any depth, because a column of structs has all fields in every row.
    """
    (file,) = part.files
    with _opened(file) as content:
        for group in range(part.start, content.groups if part.stop < 0 else part.stop):
            row = 0
            for records in content.records(group):
                for record in records:
                    yield f"{file.name}:{group}:{row}", partial(_place, file, group, row), _without_nulls(record)
                    row += 1


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _place(file: File, group: int, row: int) -> str:
    return f"{file.where}, group {group}, row {row}"


class _Parquet:
    def __init__(self, path: str) -> None:
        import pyarrow.parquet as parquet

        self._file = parquet.ParquetFile(path)
        self.groups: int = self._file.num_row_groups
        self.names: list[str] = self._file.schema_arrow.names

    def column(self, group: int, name: str) -> Iterator[list[Any]]:
        for batch in self._file.iter_batches(_ROWS, row_groups=[group], columns=[name]):
            yield values(batch.column(0))

    def records(self, group: int) -> Iterator[list[dict[str, Any]]]:
        for batch in self._file.iter_batches(_ROWS, row_groups=[group]):
            yield _rows_of(batch)

    def close(self) -> None:
        self._file.close()


class _Arrow:
    """Arrow's file format, or the stream format that the `datasets` library writes; both are memory-mapped."""

    def __init__(self, path: str) -> None:
        import pyarrow as pa

        self._map = pa.memory_map(path)
        magic = self._map.read(6)
        self._map.seek(0)
        if magic == b"ARROW1":
            self._file: Any = pa.ipc.open_file(self._map)
            self.groups: int = self._file.num_record_batches
            self._batch = self._file.get_batch
        else:
            self._file = pa.ipc.open_stream(self._map)
            batches = list(self._file)  # views of the map, no copies
            self.groups = len(batches)
            self._batch = batches.__getitem__
        self.names: list[str] = self._file.schema.names

    def column(self, group: int, name: str) -> Iterator[list[Any]]:
        column = self._batch(group).column(name)
        for start in range(0, len(column), _ROWS):
            yield values(column.slice(start, _ROWS))

    def records(self, group: int) -> Iterator[list[dict[str, Any]]]:
        batch = self._batch(group)
        for start in range(0, len(batch), _ROWS):
            yield _rows_of(batch.slice(start, _ROWS))

    def close(self) -> None:
        self._map.close()


@contextmanager
def _opened(file: File) -> Iterator[_Parquet | _Arrow]:
    try:
        import pyarrow as pa
    except ImportError as error:
        raise DataError(f"{file.where} needs pyarrow; pip install 'forge-data[arrow]'") from error
    path = str(local_path(file))
    try:
        content = _Parquet(path) if file.where.endswith(PARQUET) else _Arrow(path)
        try:
            yield content
        finally:
            content.close()
    except (pa.ArrowException, OSError, UnicodeError) as error:  # UnicodeError: names of columns
        raise DataError(f"{file.where} is damaged, or is not a Parquet or Arrow file: {error}; restore the file") from error


def values(column: "pa.Array") -> list[Any]:
    """Returns the values of a column as Python objects; lists of integers as numpy arrays, which is many times faster.

    The column is validated first: with wrong offsets, Arrow would read outside of the column and crash the process.

    Raises:
        pyarrow.ArrowException: the column is damaged.
    """
    import pyarrow as pa

    _with_bytes(column).validate(full=True)
    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_integer(kind.value_type):
        return _plain(column)
    flat = column.values
    if flat.null_count:
        return _plain(column)
    ids = flat.to_numpy(zero_copy_only=False)
    edges = column.offsets.to_numpy(zero_copy_only=False).astype(np.int64)
    missing = column.is_null().to_pylist() if column.null_count else [False] * len(column)
    return [None if missing[row] else ids[edges[row] : edges[row + 1]] for row in range(len(column))]


def _rows_of(batch: "pa.RecordBatch") -> list[dict[str, Any]]:
    """Returns the rows of a batch, which is validated first; see `values`."""
    batch.validate(full=True)
    return batch.to_pylist()


def _with_bytes(column: "pa.Array") -> "pa.Array":
    """Returns a view of a text column as bytes, so that invalid UTF-8 makes only its record invalid, not the column."""
    import pyarrow as pa

    kind = column.type
    if pa.types.is_string(kind):
        return column.view(pa.binary())
    if pa.types.is_large_string(kind):
        return column.view(pa.large_binary())
    if pa.types.is_string_view(kind):
        return column.view(pa.binary_view())
    if pa.types.is_dictionary(kind):
        return pa.DictionaryArray.from_arrays(column.indices, _with_bytes(column.dictionary), safe=False)
    return column


def _plain(column: "pa.Array") -> list[Any]:
    """Returns the values as Python objects. Text that is not UTF-8 becomes bytes, so that other records stay readable."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [_text_or_bytes(value) for value in column]


def _text_or_bytes(value: Any) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError:
        return value.as_buffer().to_pybytes()
