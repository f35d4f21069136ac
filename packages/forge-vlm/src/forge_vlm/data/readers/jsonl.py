"""JSON lines whose records name image files in a folder."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from forge_core.errors import DataError
from forge_data.sources.jsonl import SUFFIXES, each_line
from forge_data.storage.checksums import digest_of
from forge_data.storage.files import File, find, local_path
from forge_vlm.data.documents import Broken, Record
from forge_vlm.data.readers.files import ImageFiles


class JsonlExamples:
    """The records of some files; a reference is the path of an image, see `ImageFiles`."""

    def __init__(self, path: str, folder: str | None, images: str) -> None:
        """
        Args:
            path: of the records.
            folder: of the images; by default that of the file that a record comes from.
            images: field that names an image, or a list of them.

        Raises:
            DataError: the file does not exist.
        """
        self.what = path
        self._files = find(path, (*SUFFIXES, ".json"), "JSON lines")
        self._folder = ImageFiles(self._files, folder)
        self._images = images

    @property
    def fingerprint(self) -> str:
        """Of the records and the folder."""
        return digest_of(self._files, f"jsonl {self._folder.identity}")

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any] | Broken]]:
        """(file and byte of its line, record) of each."""
        for file in self._files:
            for name, place, record in _list(file) if file.name.endswith(".json") else _lines(file):
                yield name, self._resolved(file, place, record) if isinstance(record, dict) else record

    def fetch(self, reference: str) -> bytes:
        """The file of an image."""
        return self._folder.read(reference)

    def is_there(self, reference: str) -> bool:
        """Whether there is such a file."""
        return self._folder.is_there(reference)

    def _resolved(self, file: File, place: str, record: dict[str, Any]) -> Record:
        """The record with references in the place of names; what is no name stays, and is refused as it is."""
        named = record.get(self._images)
        if isinstance(named, str) and named:
            record[self._images] = self._folder.reference(file, named)
        elif isinstance(named, list):
            record[self._images] = [
                self._folder.reference(file, name) if isinstance(name, str) and name else name for name in named
            ]
        return Record(record, place)


def _lines(file: File) -> Iterator[tuple[str, str, dict[str, Any] | Broken]]:
    for offset, place, record in each_line(file):
        yield f"{file.name}:{offset}", place, record if isinstance(record, dict) else Broken(f"{place} {record}")


def _list(file: File) -> Iterator[tuple[str, str, dict[str, Any] | Broken]]:
    """A file that is one list, as those of LLaVA are."""
    try:
        found = json.loads(local_path(file).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise DataError(f"{file.where} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        why = "brackets are nested too deeply" if isinstance(error, RecursionError) else error
        raise DataError(f"{file.where} is not valid JSON: {why}") from error
    if not isinstance(found, list):
        raise DataError(f"{file.where} is not a list of records; give JSON lines, or a list")
    for number, record in enumerate(found):
        place = f"{file.where}, record {number + 1}"
        yield f"{file.name}:{number}", place, record if isinstance(record, dict) else Broken(f"{place} is not a JSON object")
