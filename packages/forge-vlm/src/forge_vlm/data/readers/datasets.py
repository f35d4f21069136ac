"""Datasets of the Hugging Face library with columns of images."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from forge_core.errors import DataError
from forge_data.sources.huggingface import fingerprint_of, load
from forge_vlm.data.documents import Record

if TYPE_CHECKING:
    from datasets import Dataset

_ROWS = 256


class DatasetExamples:
    """The rows of a dataset; images are those of one column, each an image or a list of images, as their encoded files."""

    def __init__(self, path: str, subset: str | None, dataset_split: str, images: str) -> None:
        """
        Args:
            path: a directory that `save_to_disk` wrote, a directory of data files, or a name on the hub.
            subset: configuration of a hub dataset that has several.
            dataset_split: the dataset's own split.
            images: column of images.

        Raises:
            DataError: `datasets` is not installed, or dataset, split or column do not exist.
        """
        self.what = f"{path} ({dataset_split})"
        self._options: dict[str, Any] = {"path": path, "subset": subset, "dataset_split": dataset_split}
        self._images = images
        names = self._dataset.column_names
        if images not in names:
            raise DataError(f"{self.what} has no column {images!r}; it has {', '.join(names)}")

    @property
    def fingerprint(self) -> str:
        """The dataset's own, which knows its rows."""
        return f"huggingface {fingerprint_of(self._dataset)} {self._images}"

    @cached_property
    def _dataset(self) -> "Dataset":
        from datasets import Image, List

        found = load(**self._options)
        kind = found.features.get(self._images)
        if isinstance(kind, Image):
            return found.cast_column(self._images, Image(decode=False))
        if isinstance(getattr(kind, "feature", None), Image):
            return found.cast_column(self._images, List(Image(decode=False)))
        return found

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """(split and row, record) of each; an image is named by its row and its number there."""
        split = self._options["dataset_split"]
        columns = [name for name in self._dataset.column_names if name != self._images]
        others = self._dataset.select_columns(columns) if columns else None
        pictures = self._dataset.select_columns([self._images]).with_format("arrow")
        for start in range(0, len(self._dataset), _ROWS):
            stop = min(start + _ROWS, len(self._dataset))
            found = others[start:stop] if others is not None else {}
            for row, count in enumerate(_counts(pictures[start:stop][self._images]), start):
                record = {name: values[row - start] for name, values in found.items()}
                record[self._images] = [f"{row}.{number}" for number in range(count)]
                yield f"{split}:{row}", Record(record, f"{self.what}, row {row}")

    def fetch(self, reference: str) -> bytes:
        """The file of an image."""
        row, _, number = reference.partition(".")
        held = self._dataset[int(row)][self._images]
        image = held[int(number)] if isinstance(held, list) else held
        content = image.get("bytes") if isinstance(image, dict) else image if isinstance(image, bytes) else None
        if content is None and isinstance(image, dict) and image.get("path"):
            try:
                with open(image["path"], "rb") as file:  # noqa: PTH123 (datasets names local files as text)
                    return file.read()
            except OSError as error:
                raise DataError(f"{image['path']} cannot be read: {error.strerror or error}") from error
        if not isinstance(content, bytes):
            raise DataError(f"{self.what}, row {row}: {self._images!r} holds no image")
        return content


def _counts(column: Any) -> list[int]:
    """Images in each value of an Arrow column; their content is not read."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    if any(is_list(column.type) for is_list in kinds):
        lengths = pc.call_function("list_value_length", [column])
        return [length or 0 for length in lengths.to_pylist()]
    return [int(valid) for valid in column.is_valid().to_pylist()]
