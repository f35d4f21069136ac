"""Shards of WebDataset: tar files whose members with one stem are one record (`0001.jpg`, `0001.txt`, `0001.json`)."""

import json
import tarfile
from collections.abc import Iterator, Mapping
from typing import Any

from forge_core.errors import DataError
from forge_data.storage.files import find, local_path, read_bytes
from forge_data.storage.fingerprints import digest_of

IMAGES = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff")
TEXTS = ("txt", "caption", "text")


class TarExamples:
    """The records of some shards: `.json` gives fields, a text file the field of text; images in the order of their names.

    Members of a record stand next to each other, as WebDataset writes them. A reference is shard, offset and size, so that an
    image is read without the tar's table.
    """

    def __init__(self, path: str, text: str, images: str) -> None:
        """`text` and `images`: fields into which text files and images are put.

        Raises:
            DataError: the file does not exist.
        """
        self.what = path
        self._files = find(path, (".tar",), "tar")
        self._by_name = {file.name: file for file in self._files}
        self._text, self._images = text, images

    @property
    def fingerprint(self) -> str:
        """Of the shards."""
        return digest_of(self._files, "webdataset")

    def __iter__(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """(shard and stem, record) of each."""
        for file in self._files:
            try:
                with tarfile.open(local_path(file), "r:") as tar:
                    yield from self._records(tar, file.name)
            except (tarfile.TarError, EOFError) as error:
                raise DataError(f"{file.where} is not an uncompressed tar, or damaged: {error}") from error

    def fetch(self, reference: str) -> bytes:
        """The file of an image."""
        name, _, place = reference.rpartition("#")
        offset, size = map(int, place.split("+"))
        file = self._by_name.get(name)
        if file is None:
            raise DataError(f"shard {name} of {self.what} is missing")
        found = read_bytes(file, offset, offset + size)
        if len(found) != size:
            raise DataError(f"{file.where} is truncated: it ends inside an image at byte {offset}")
        return found

    def _records(self, tar: tarfile.TarFile, shard: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        stem, held = "", dict[str, Any]()
        for member in tar:
            if not member.isfile():
                continue
            folder, _, name = member.name.rpartition("/")
            begin, _, kind = name.partition(".")
            own = f"{folder}/{begin}" if folder else begin
            if own != stem and held:
                yield f"{shard}/{stem}", self._record(held)
                held = {}
            stem = own
            kind = kind.lower()
            if kind.rpartition(".")[2] in IMAGES:
                held[kind] = f"{shard}#{member.offset_data}+{member.size}"
            elif kind in (*TEXTS, "json"):
                content = tar.extractfile(member)
                held[kind] = b"" if content is None else content.read()
        if held:
            yield f"{shard}/{stem}", self._record(held)

    def _record(self, held: Mapping[str, Any]) -> Mapping[str, Any]:
        """Fields of one record; what cannot be read is left out, and the record is then broken for want of it."""
        found: dict[str, Any] = {}
        try:
            described = json.loads(held["json"]) if "json" in held else {}
            found |= described if isinstance(described, dict) else {}
            for kind in TEXTS:
                if kind in held:
                    found[self._text] = held[kind].decode("utf-8")
        except ValueError:  # UnicodeDecodeError is one
            found.pop(self._text, None)
        found[self._images] = [held[kind] for kind in sorted(held) if kind.rpartition(".")[2] in IMAGES]
        return found
