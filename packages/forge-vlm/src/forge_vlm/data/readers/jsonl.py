"""JSON lines whose records name image files in a folder."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forge_core.errors import DataError
from forge_data.sources.records.jsonl import SUFFIXES, records
from forge_data.storage.file import File
from forge_data.storage.files import find
from forge_data.storage.fingerprints import digest_of


class JsonlExamples:
    """The records of some files; images are paths relative to `folder`."""

    def __init__(self, path: str, folder: str | None) -> None:
        """`folder` is by default that of the first file.

        Raises:
            DataError: the file does not exist.
        """
        self.what = path
        self._files = find(path, (*SUFFIXES, ".json"), "JSON lines")
        self._folder = Path(folder) if folder is not None else Path(self._files[0].where).parent

    @property
    def fingerprint(self) -> str:
        """Of the records and the folder."""
        return digest_of(self._files, f"jsonl {self._folder}")

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """(file and byte of its line, record) of each."""
        for file in self._files:
            yield from _list(file) if file.name.endswith(".json") else _lines(file)

    def fetch(self, reference: str) -> bytes:
        """The file of an image."""
        path = self._folder / reference
        try:
            return path.read_bytes()
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _lines(file: File) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for offset, record in records(file):
        yield f"{file.name}:{offset}", record


def _list(file: File) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A file that is one list, as those of LLaVA are."""
    try:
        found = json.loads(Path(file.where).read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{file.where} is not valid JSON: {error}") from error
    if not isinstance(found, list):
        raise DataError(f"{file.where} is not a list of records; give JSON lines, or a list")
    for number, record in enumerate(found):
        yield f"{file.name}:{number}", record
