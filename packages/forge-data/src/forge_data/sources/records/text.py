"""Text files as documents: one document a file, in the order of their names; empty files are left out."""

from collections.abc import Iterator, Sequence

from forge_core.errors import DataError
from forge_data.sources.records.parts import Document, Part, Records, Skips, Wanted, grouped, in_split
from forge_data.sources.records.values import wide_encoding
from forge_data.storage.file import File
from forge_data.storage.files import find, read_bytes

SUFFIXES = (".txt", ".md")
"""What a directory is searched for."""

_MARK = "\ufeff"
"""The byte order mark, with which some editors begin a file of UTF-8; it is not text."""


def text_files(path: str, split: str = "all", held_out: float = 0.05, skip: int = 0) -> Records:
    """The files that a path, directory, pattern or URL names, sorted by their path relative to its fixed part.

    Raises:
        DataError: there is none, none in this split, or only empty ones.
    """
    found = find(path, SUFFIXES, "text")
    chosen = [file for file in found if in_split(file.name, split, held_out)]
    if not chosen:
        raise DataError(f"{path}: none of {len(found)} files is in split {split!r}; give more files or another held_out")
    return documents(chosen, f"{path} ({split})", skip)


def documents(files: Sequence[File], what: str, skip: int = 0) -> Records:
    """Each of `files` as one document; `what` names them in messages.

    Raises:
        DataError: all are empty.
    """
    if not any(file.size for file in files):
        raise DataError(f"{what} has no text ({len(files)} files); check the path")
    return Records(files, Wanted("text"), what, grouped, skip)


def read(part: Part, _: Wanted, skips: Skips) -> Iterator[Document]:
    """See `parts.Reader`. A document is named by its file."""
    for file in part.files:
        content = read_bytes(file, 0, file.size)
        if encoding := wide_encoding(content[:4]):
            skips.broken(f"{file.where} is {encoding} text by its byte order mark; convert it to UTF-8")
            continue
        try:
            text = content.decode("utf-8").removeprefix(_MARK)
        except UnicodeDecodeError as error:
            skips.broken(f"{file.where} at byte {error.start} is not UTF-8 text: {error.reason}; convert or remove it")
            continue
        yield file.name, text
