"""Datasets of the Hugging Face library: a directory of `save_to_disk`, a directory of data files, or a hub name."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.errors import DataError
from forge_data.sources.records import CorpusPart, Document, Records, Skips, Wanted, checked_value
from forge_data.storage.checksums import digest_of
from forge_data.storage.files import File, find_one, is_url

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

_ROWS = 1024
_STREAM_SHARDS = 64
_CANNOT = "dataset {} cannot be loaded: {}; check the name and the network connection"


def open_dataset(
    path: str,
    *,
    subset: str | None = None,
    dataset_split: str = "train",
    text: str = "text",
    ids: str | None = None,
    split: str = "all",
    held_out: float = 0.05,
    skip: int = 0,
) -> Records:
    """Opens the documents of a dataset; downloads a hub dataset first.

    Args:
        path: a directory that `save_to_disk` wrote, a directory of data files, or a name on the hub.
        subset: configuration of a hub dataset that has several.
        dataset_split: the dataset's own split.
        text: column of the text.
        ids: column of lists of token ids; if set, it is read instead of the text.
        split, held_out: see `in_split`.
        skip: maximum number of broken records that are skipped.

    Raises:
        DataError: `datasets` is not installed, or the dataset, split or column does not exist.
    """
    options: dict[str, Any] = {"path": path, "subset": subset, "dataset_split": dataset_split}
    dataset = load(**options)
    column = ids or text
    if column not in dataset.column_names:
        raise DataError(f"{path} has no column {column!r}; it has {', '.join(dataset.column_names)}")
    wanted = Wanted("huggingface", column, ids is not None, split, held_out, options)
    files = _files(dataset, path)
    cut, what = partial(_cut, len(dataset)), f"{path} ({dataset_split})"
    return Records(files, wanted, what, cut, skip, fingerprint_of(dataset))


def read(part: CorpusPart, wanted: Wanted, skips: Skips) -> Iterator[Document]:
    """See `records.RecordReader`. The name of a document is its row."""
    import pyarrow as pa

    from forge_data.sources.columns import values

    dataset = load(**wanted.options).select_columns([wanted.column]).with_format("arrow")
    for start in range(part.start, part.stop, _ROWS):
        stop = min(start + _ROWS, part.stop)
        try:
            column = [value for chunk in dataset[start:stop][wanted.column].chunks for value in values(chunk)]
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{wanted.options['path']} is damaged in rows {start} to {stop}: {error}; restore it") from error
        for row, value in enumerate(column, start):
            document = checked_value(value, partial("{}, row {}".format, wanted.options["path"], row), wanted, skips)
            if document is not None:
                yield f"{wanted.options['dataset_split']}:{row}", document


def _cut(rows: int, files: Sequence[File], size: int) -> list[CorpusPart]:
    """Returns ranges of rows, each of about `size` bytes; `files` are used only for their sizes."""
    total = max(1, sum(file.size for file in files))
    step = max(1, round(rows * size / total))
    return [
        CorpusPart((), start, min(start + step, rows), total * (min(start + step, rows) - start) // rows)
        for start in range(0, rows, step)
    ]


def _files(dataset: "Dataset", path: str) -> list[File]:
    """Returns the files of a dataset."""
    files = [file for entry in dataset.cache_files if (file := find_one(str(entry["filename"]))) is not None]
    if not files:  # a dataset in memory; occurs only in tests
        raise DataError(f"{path} has no files on disk; write it with save_to_disk")
    return files


def open_stream_of(path: str, subset: str | None, dataset_split: str, column: str) -> tuple["IterableDataset", str]:
    """Returns the dataset as a stream, and its identity: a digest of its files or their ETags.

    Raises:
        DataError: `datasets` is not installed, or the dataset, split or column does not exist.
    """
    _refuse_empty(path)
    directory = Path(path).expanduser()
    if (directory / "dataset_dict.json").exists() or (directory / "state.json").exists():
        dataset = load(path, subset, dataset_split)
        stream = dataset.to_iterable_dataset(num_shards=min(len(dataset), _STREAM_SHARDS))
        identity = digest_of(_files(dataset, path), f"{dataset._fingerprint} {stream.num_shards}")
    else:
        stream, identity = _hub_stream(path, subset, dataset_split)
    if stream.column_names is not None and column not in stream.column_names:
        raise DataError(f"{path} has no column {column!r}; it has {', '.join(stream.column_names)}")
    return stream, identity


def _hub_stream(path: str, subset: str | None, dataset_split: str) -> tuple["IterableDataset", str]:
    datasets = _library()
    try:
        builder = datasets.load_dataset_builder(path, subset)
        stream = builder.as_streaming_dataset(split=dataset_split)
    except (OSError, ValueError, ImportError, IndexError) as error:
        raise DataError(_CANNOT.format(path, error)) from error
    files = (builder.config.data_files or {}).get(dataset_split)
    here = [find_one(str(file)) for file in files or () if not is_url(str(file))]
    if here and None not in here and len(here) == len(files or ()):
        return stream, digest_of([file for file in here if file is not None], builder.config.name)
    return stream, f"{list(files or ())} {getattr(files, 'origin_metadata', None)} {builder.config_id}"


def _refuse_empty(path: str) -> None:
    if not path.strip():
        raise DataError("the path of the dataset is empty; use '.' for the working directory")


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError("source 'huggingface' needs the datasets library; pip install 'forge-data[huggingface]'") from error
    return datasets


def fingerprint_of(dataset: "Dataset") -> str:
    """Returns the library's fingerprint, which also changes when rows are filtered."""
    return dataset._fingerprint


def load(path: str, subset: str | None, dataset_split: str) -> "Dataset":
    """Loads a dataset with random access; see `open_dataset`.

    Raises:
        DataError: `datasets` is not installed, or the dataset or split does not exist.
    """
    _refuse_empty(path)
    datasets = _library()
    directory = Path(path).expanduser()
    try:
        if (directory / "dataset_dict.json").exists() or (directory / "state.json").exists():
            dataset = datasets.load_from_disk(str(directory))
            if isinstance(dataset, datasets.DatasetDict):
                if dataset_split not in dataset:
                    raise DataError(f"{path} has no split {dataset_split!r}; it has {', '.join(map(str, dataset))}")
                dataset = dataset[dataset_split]
        else:
            dataset = datasets.load_dataset(path, subset, split=dataset_split)
    except (OSError, ValueError, ImportError, IndexError) as error:  # missing names, files, connections or rows
        raise DataError(_CANNOT.format(path, error)) from error
    if not isinstance(dataset, datasets.Dataset):
        raise DataError(f"{path} is not a dataset with random access; write it with save_to_disk")
    if not len(dataset):
        raise DataError(f"{path} ({dataset_split}) has no rows; check dataset_split")
    return dataset
