"""Image files that records name: where they are, which files are images, and the order of their names."""

import re
from collections.abc import Sequence
from functools import lru_cache
from os.path import commonpath, relpath
from pathlib import Path

from forge_core.errors import DataError
from forge_data.storage.files import File


class ImageFiles:
    """Resolves the names of image files: relative to `folder`, or to the directory of the file that a record comes from.

    A reference is a path relative to `base`, so one base resolves the records of all directories.

    Attributes:
        base: directory to which references are relative.
        identity: equal where equal names give equal references and files.
    """

    def __init__(self, files: Sequence[File], folder: str | None) -> None:
        """
        Args:
            files: the files of records.
            folder: directory of the images; None is the directory of each file.

        Raises:
            DataError: `folder` is empty.
        """
        if folder == "":
            raise DataError('folder = "" names no directory; give one, or leave the key out')
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
        """The reference of an image that a record of `file` names."""
        prefix = self._prefixes.get(file.where, ".")
        return name if prefix == "." or Path(name).is_absolute() else f"{prefix}/{name}"

    def path(self, reference: str) -> Path:
        """Where the file is.

        Raises:
            DataError: it would be next to a file of records that a URL names.
        """
        path = self.base / reference
        if self._remote and not Path(reference).is_absolute():
            raise DataError(f"{reference} has no directory: a URL names the records; set folder to the directory of the images")
        return path

    def is_there(self, reference: str) -> bool:
        """Whether there is such a file; nothing is read."""
        return self.path(reference).is_file()

    def read(self, reference: str) -> bytes:
        """The content of the file.

        Raises:
            DataError: it cannot be read.
        """
        path = self.path(reference)
        try:
            return path.read_bytes()
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def is_image(name: str) -> bool:
    """Whether Pillow reads files with the suffix of this name."""
    return name.rpartition(".")[2].lower() in _suffixes()


@lru_cache(1)
def _suffixes() -> frozenset[str]:
    from PIL import Image

    return frozenset(suffix[1:] for suffix, kind in Image.registered_extensions().items() if kind in Image.OPEN)


def natural(name: str) -> tuple[list[tuple[int, str]], str]:
    """A key that sorts names with their numbers as numbers: `2.png` before `10.png`; of equal numbers `02` before `2`."""
    parts = re.split("([0-9]+)", name)  # text and digits in turn; it begins and ends with text
    digits = (part.lstrip("0") for part in parts[1::2])
    lengths = [0] * len(parts)
    for place, number in enumerate(digits):
        parts[2 * place + 1], lengths[2 * place + 1] = number, len(number)
    return list(zip(lengths, parts, strict=True)), name
