"""Readers of documents with images: JSON lines, WebDataset, Hugging Face datasets, and the digits of scikit-learn.

Each reader implements the protocol `Examples`. The end of the file resolves and sorts names of image files.
"""

import json
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from io import BytesIO
from os.path import commonpath, relpath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.errors import DataError
from forge_data.sources.huggingface import fingerprint_of, load
from forge_data.sources.jsonl import SUFFIXES
from forge_data.storage.checksums import digest_of
from forge_data.storage.files import File, find, local_path, read_bytes
from forge_vlm.data.documents import BrokenRecord, Record
from forge_vlm.data.rows import read_json, read_lines

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset

TEXT_SUFFIXES = ("txt", "caption", "text")
"""Suffixes of WebDataset members that are text."""
DIGIT_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_COMPRESSED_TARS = tuple(f".{kind}" for kind in ("tar.gz", "tgz", "tar.bz2", "tbz2", "tar.xz", "txz", "tar.zst", "tzst"))
_ROWS_AT_ONCE = 256
"""Number of dataset rows that are read together."""


class JsonlExamples:
    """JSON lines whose records name image files in a folder; a reference is the path of an image, see `ImageFiles`."""

    def __init__(self, path: str, folder: str | None, images: str) -> None:
        """
        Args:
            path: path of the records.
            folder: folder of the images; by default the folder of the record's file.
            images: field that names an image, or a list of images.

        Raises:
            DataError: the file does not exist.
        """
        self.what = path
        self._files = find(path, (*SUFFIXES, ".json"), "JSON lines")
        self._folder = ImageFiles(self._files, folder)
        self._images = images

    @property
    def fingerprint(self) -> str:
        """Changes with the records and the folder."""
        return digest_of(self._files, f"jsonl {self._folder.identity}")

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any] | BrokenRecord]]:
        """Yields (file and byte offset of the line, record)."""
        for file in self._files:
            for name, place, record in read_json(file) if file.name.endswith(".json") else read_lines(file):
                yield name, self._resolved(file, place, record) if isinstance(record, dict) else record

    def fetch(self, reference: str) -> bytes:
        """Returns the content of an image file."""
        return self._folder.read(reference)

    def is_there(self, reference: str) -> bool:
        """Whether the file of a reference exists."""
        return self._folder.is_there(reference)

    def _resolved(self, file: File, place: str, record: dict[str, Any]) -> Record:
        """Returns the record with references in place of names. Other values are kept, and refused later."""
        named = record.get(self._images)
        if isinstance(named, str) and named:
            record[self._images] = self._folder.reference(file, named)
        elif isinstance(named, list):
            record[self._images] = [
                self._folder.reference(file, name) if isinstance(name, str) and name else name for name in named
            ]
        return Record(record, place)


class TarExamples:
    """Shards of WebDataset: tar files whose members with one key are one record (`0001.jpg`, `0001.txt`, `0001.json`).

    A `.json` member contains fields, and a text file the text field. Images are sorted by name, see `natural_key`. As in
    WebDataset,
    a name is split at its first dot: the part before the dot, with the directory, is the key of the record, and the rest is the
    kind of the member. Members of a record must be neighbors. Names that begin with a dot are skipped. A reference is shard,
    offset and size, so reading an image does not need the tar's table.
    """

    def __init__(self, path: str, text: str, images: str, ignore: Sequence[str] = (), text_records: bool = False) -> None:
        """
        Args:
            path: path of the shards.
            text, images: fields that receive the text and the images.
            ignore: kinds of members to skip.
            text_records: a record without an image is text instead of broken.

        Raises:
            DataError: the file does not exist, or is compressed.
        """
        self.what = path
        self._files = find(path, (".tar", *_COMPRESSED_TARS), "tar")
        for file in self._files:
            if file.name.lower().endswith(_COMPRESSED_TARS):
                raise DataError(
                    f"{file.where} is compressed, but images are read from the middle of a shard; decompress it (gunzip, unxz), "
                    "or exclude it with a pattern such as '*.tar'"
                )
        self._by_name = {file.name: file for file in self._files}
        self._text, self._images = text, images
        self._ignore, self._text_records = frozenset(kind.lower().removeprefix(".") for kind in ignore), text_records

    @property
    def fingerprint(self) -> str:
        """Changes with the shards and the way they are read."""
        return digest_of(self._files, f"webdataset by number {sorted(self._ignore)} {self._text_records}")

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any] | BrokenRecord]]:
        """Yields (shard and key, record)."""
        for file in self._files:
            try:
                with tarfile.open(local_path(file), "r:") as tar:
                    for key, members in _group_members(tar):
                        place = f"{file.where}, record {key}"
                        try:
                            yield f"{file.name}/{key}", Record(self._record(tar, members, file.name), place)
                        except BrokenRecord as broken:
                            yield f"{file.name}/{key}", BrokenRecord(f"{place} {broken}")
            except (tarfile.TarError, EOFError) as error:
                raise DataError(f"{file.where} is damaged, or not an uncompressed tar file: {error}") from error

    def fetch(self, reference: str) -> bytes:
        """Returns the content of an image file."""
        name, _, place = reference.rpartition("#")
        offset, size = map(int, place.split("+"))
        file = self._by_name.get(name)
        if file is None:
            raise DataError(f"shard {name} of {self.what} does not exist")
        content = read_bytes(file, offset, offset + size)
        if len(content) != size:
            raise DataError(f"{file.where} is truncated: it ends inside an image at byte {offset}")
        return content

    def _record(self, tar: tarfile.TarFile, members: Sequence[tuple[str, tarfile.TarInfo]], shard: str) -> dict[str, Any]:
        """Returns the fields of one record.

        Raises:
            BrokenRecord: a member is of an unknown kind, a duplicate, or unreadable, or there is no image.
        """
        images: dict[str, str] = {}
        texts: dict[str, str] = {}
        fields: dict[str, Any] = {}
        seen: set[str] = set()
        for kind, member in members:
            if kind in self._ignore:
                continue
            if kind in seen:
                raise BrokenRecord(f"has two members {member.name}; give every record a unique key")
            seen.add(kind)
            regular = member.isreg() and not member.issparse()
            if regular and is_image(f".{kind}"):
                images[kind] = f"{shard}#{member.offset_data}+{member.size}"
            elif regular and kind in TEXT_SUFFIXES:
                texts[kind] = _member_text(tar, member)
            elif regular and kind == "json":
                fields = _member_fields(tar, member)
            else:
                raise BrokenRecord(f"has the member {member.name}, {_member_fault(kind, member)}")
        if len(set(texts.values())) > 1:
            raise BrokenRecord(f"has several text members ({', '.join(texts)}); add all but one to ignore")
        if not images and (fields.get(self._images) or not self._text_records):
            raise BrokenRecord("has no image; set text_records = true if records without images are text")
        if texts:
            fields[self._text] = next(iter(texts.values()))
        return fields | {self._images: [images[kind] for kind in sorted(images, key=natural_key)]}


def _group_members(tar: tarfile.TarFile) -> Iterator[tuple[str, list[tuple[str, tarfile.TarInfo]]]]:
    """Yields (key, [(kind, member)]) of neighboring members with the same key."""
    key, members = "", list[tuple[str, tarfile.TarInfo]]()
    for member in tar:
        folder, _, name = member.name.rpartition("/")
        if member.isdir() or name.startswith("."):
            continue
        begin, _, kind = name.partition(".")
        own = f"{folder}/{begin}" if folder else begin
        if own != key and members:
            yield key, members
            members = []
        key = own
        members.append((kind.lower(), member))
    if members:
        yield key, members


def _member_text(tar: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    content = tar.extractfile(member)
    assert content is not None, "the member is a regular file"
    try:
        return content.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise BrokenRecord(f"has the member {member.name}, which is not UTF-8: {error.reason} at byte {error.start}") from error


def _member_fields(tar: tarfile.TarFile, member: tarfile.TarInfo) -> dict[str, Any]:
    try:
        fields = json.loads(_member_text(tar, member))
    except (ValueError, RecursionError) as error:
        why = "brackets are nested too deeply" if isinstance(error, RecursionError) else error
        raise BrokenRecord(f"has the member {member.name}, which is not valid JSON: {why}") from error
    if not isinstance(fields, dict):
        raise BrokenRecord(f"has the member {member.name}, which is not a JSON object")
    return fields


def _member_fault(kind: str, member: tarfile.TarInfo) -> str:
    """Returns why a member of this kind is refused."""
    _, dot, last = kind.rpartition(".")
    if not member.isreg() or member.issparse():
        return "which is a link or another special file; write the tar with --dereference"
    if dot and (last in (*TEXT_SUFFIXES, "json")):
        return f"but a name is split at its first dot, so its kind is {kind!r}; use no dots before the suffix"
    known = f"known kinds are images that Pillow reads, {', '.join(TEXT_SUFFIXES)} and json"
    return f"whose kind {kind!r} is unknown; {known}; add the kind to ignore to skip such members"


class DatasetExamples:
    """The rows of a Hugging Face dataset; one column has an image or a list of images, as encoded files."""

    def __init__(self, path: str, subset: str | None, dataset_split: str, images: str) -> None:
        """
        Args:
            path: a directory written by `save_to_disk`, a directory of data files, or a name on the hub.
            subset: configuration name, for hub datasets with several.
            dataset_split: split of the dataset.
            images: image column.

        Raises:
            DataError: `datasets` is not installed, or the dataset, split or column does not exist.
        """
        self.what = f"{path} ({dataset_split})"
        self._options: dict[str, Any] = {"path": path, "subset": subset, "dataset_split": dataset_split}
        self._images = images
        names = self._dataset.column_names
        if images not in names:
            raise DataError(f"{self.what} has no column {images!r}; it has {', '.join(names)}")

    @property
    def fingerprint(self) -> str:
        """The dataset's own fingerprint, which depends on its rows."""
        return f"huggingface {fingerprint_of(self._dataset)} {self._images}"

    @cached_property
    def _dataset(self) -> "Dataset":
        from datasets import Image, List

        dataset = load(**self._options)
        kind = dataset.features.get(self._images)
        if isinstance(kind, Image):
            return dataset.cast_column(self._images, Image(decode=False))
        if isinstance(getattr(kind, "feature", None), Image):
            return dataset.cast_column(self._images, List(Image(decode=False)))
        return dataset

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yields (split and row, record); an image is named by its row and its index within the row."""
        split = self._options["dataset_split"]
        columns = [name for name in self._dataset.column_names if name != self._images]
        others = self._dataset.select_columns(columns) if columns else None
        pictures = self._dataset.select_columns([self._images]).with_format("arrow")
        for start in range(0, len(self._dataset), _ROWS_AT_ONCE):
            stop = min(start + _ROWS_AT_ONCE, len(self._dataset))
            rows = others[start:stop] if others is not None else {}
            for row, count in enumerate(_image_counts(pictures[start:stop][self._images]), start):
                record = {name: values[row - start] for name, values in rows.items()}
                record[self._images] = [f"{row}.{number}" for number in range(count)]
                yield f"{split}:{row}", Record(record, f"{self.what}, row {row}")

    def fetch(self, reference: str) -> bytes:
        """Returns the content of an image file."""
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
            raise DataError(f"{self.what}, row {row}: the column {self._images!r} contains no image")
        return content


def _image_counts(column: Any) -> list[int]:
    """Returns the number of images in each value of an Arrow column without reading them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    if any(is_list(column.type) for is_list in kinds):
        lengths = pc.call_function("list_value_length", [column])
        return [length or 0 for length in lengths.to_pylist()]
    return [int(valid) for valid in column.is_valid().to_pylist()]


def caption(digits: "list[int]") -> str:
    """Returns the caption of a list of digits."""
    return " ".join(DIGIT_NAMES[digit] for digit in digits)


class DigitExamples:
    """The handwritten digits of scikit-learn: 1,797 images of 8 x 8 (Alpaydin and Kaynak, 1998). Each record has neighboring
    digits and a caption with their names; an image is named by its number."""

    def __init__(self, text: str, images: str, each: int = 1) -> None:
        """
        Args:
            text, images: fields of a record.
            each: number of images per record.

        Raises:
            DataError: scikit-learn is not installed.
        """
        self.what = "the digits of scikit-learn"
        self._text, self._images, self._each = text, images, each
        _ = self._data

    @property
    def fingerprint(self) -> str:
        """Changes with the images and their labels."""
        import xxhash

        pixels, labels = self._data
        return xxhash.xxh3_128_hexdigest(pixels.tobytes() + labels.tobytes()) + f" {self._each}"

    @cached_property
    def _data(self) -> "tuple[np.ndarray, np.ndarray]":
        """Returns pixels (1797, 8, 8) uint8, from white paper to black ink, and labels (1797,)."""
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise DataError("source 'digits' needs scikit-learn; pip install 'forge-vlm[digits]'") from error
        digits: Any = load_digits()
        ink = digits.images * (255 / 16)
        return (255 - ink).round().astype("uint8"), digits.target.astype("int64")

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yields (number of the first image, record)."""
        _, labels = self._data
        for start in range(0, len(labels) - self._each + 1, self._each):
            numbers = range(start, start + self._each)
            images = [str(number) for number in numbers]
            yield f"digits:{start}", {self._text: caption([int(labels[number]) for number in numbers]), self._images: images}

    def fetch(self, reference: str) -> bytes:
        """Returns an image as PNG."""
        from PIL import Image

        content = BytesIO()
        Image.fromarray(self._data[0][int(reference)]).save(content, "PNG")
        return content.getvalue()


class ImageFiles:
    """Resolves names of image files: relative to `folder`, or to the directory of the record's file.

    A reference is a path relative to `base`, so one base resolves the records of all directories.

    Attributes:
        base: directory to which references are relative.
        identity: text that is equal if the same names resolve to the same references and files.
    """

    def __init__(self, files: Sequence[File], folder: str | None) -> None:
        """
        Args:
            files: files of the records.
            folder: directory of the images; None: the directory of each record file.

        Raises:
            DataError: `folder` is empty.
        """
        if folder == "":
            raise DataError('folder = "" is not a directory; set folder to a directory, or remove the key')
        own = {file.where: Path(file.where).parent for file in files}
        directories = set(own.values())
        self._remote = folder is None and any(file.remote for file in files)
        self._prefixes: dict[str, str] = {}
        if folder is not None:
            self.base = Path(folder)
        elif len(directories) == 1:
            self.base = directories.pop()
        else:
            self.base = Path(commonpath(directories))
            self._prefixes = {where: relpath(directory, self.base) for where, directory in own.items()}
        self.identity = f"{self.base}{', each next to its file' if self._prefixes else ''}"

    def reference(self, file: File, name: str) -> str:
        """Returns the reference of an image that a record of `file` names."""
        prefix = self._prefixes.get(file.where, ".")
        return name if prefix == "." or Path(name).is_absolute() else f"{prefix}/{name}"

    def is_there(self, reference: str) -> bool:
        """Whether the file of a reference exists; reads nothing."""
        return self.path(reference).is_file()

    def path(self, reference: str) -> Path:
        """Returns the path of the file.

        Raises:
            DataError: the records come from a URL, and no folder is set.
        """
        path = self.base / reference
        if self._remote and not Path(reference).is_absolute():
            raise DataError(f"the directory of {reference} is unknown because the records come from a URL; set folder")
        return path

    def read(self, reference: str) -> bytes:
        """Returns the content of the file.

        Raises:
            DataError: the file cannot be read.
        """
        path = self.path(reference)
        try:
            return path.read_bytes()
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def is_image(name: str) -> bool:
    """Whether Pillow reads files with this suffix."""
    return name.rpartition(".")[2].lower() in _image_suffixes()


@lru_cache(1)
def _image_suffixes() -> frozenset[str]:
    from PIL import Image

    return frozenset(suffix[1:] for suffix, kind in Image.registered_extensions().items() if kind in Image.OPEN)


def natural_key(name: str) -> tuple[list[tuple[int, str]], str]:
    """Returns a sort key that compares numbers in names by value: `2.png` before `10.png`; for equal numbers `02` before `2`."""
    parts = re.split("([0-9]+)", name)  # text and digits alternate; the first and last parts are text
    digits = (part.lstrip("0") for part in parts[1::2])
    lengths = [0] * len(parts)
    for place, number in enumerate(digits):
        parts[2 * place + 1], lengths[2 * place + 1] = number, len(number)
    return list(zip(lengths, parts, strict=True)), name
