"""Files of a corpus, wherever they are: this module picks `local` or `remote` for each call.

Listing opens no file. A remote file is read in pieces until its whole content is needed; then it is copied into a
cache on this machine, once.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from forge_core.errors import DataError
from forge_data.storage.file import File, is_url
from forge_data.storage.local import find_local, list_local, list_local_directory, read_local
from forge_data.storage.remote import fetch, list_remote, list_remote_directory, read_remote

_FEW = 16


def read_bytes(file: File, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of a file, fewer at its end.

    Raises:
        DataError: the file cannot be read.
    """
    return read_remote(file, start, stop) if file.remote else read_local(file, start, stop)


def local_path(file: File) -> Path:
    """A path on this machine with the whole content.

    Raises:
        DataError: the file cannot be fetched.
    """
    return fetch(file) if file.remote else Path(file.where)


def find_one(path: str) -> File | None:
    """The file at exactly this path or URL, or None."""
    return next(iter(list_remote(path)), None) if is_url(path) else find_local(path)


def neighbors(files: Sequence[File]) -> Callable[[str], File | None]:
    """As `find_one`, for files in the directories of `files`; where there are many, each directory is listed once instead."""
    if len(files) < _FEW:
        return find_one
    found: dict[str, File] = {}
    for directory in {file.where.rpartition("/")[0] for file in files}:
        listed = list_remote_directory(directory) if is_url(directory) else list_local_directory(directory)
        found |= {file.where: file for file in listed}
    return found.get


def find(path: str, suffixes: Sequence[str], what: str) -> list[File]:
    """The files that a path, directory, pattern or URL names, sorted by name.

    Args:
        path: a file; a directory, searched at any depth for names that end in one of `suffixes`; or a pattern such as
            `corpus/**/*.npy`.
        suffixes: see `path`; a file that is named or matched by a pattern may end in anything.
        what: a word for messages, such as "text".

    Raises:
        DataError: there is none, or the path is empty.
    """
    if not path.strip():
        raise DataError(f"the path of {what} files is empty; '.' is the working directory")
    found = list_remote(path, suffixes) if is_url(path) else list_local(path, suffixes, what)
    if not found:
        raise DataError(f"{path} matches no {what} file; in a directory, Forge looks for {', '.join(suffixes)}")
    return sorted(found, key=lambda file: file.name)
