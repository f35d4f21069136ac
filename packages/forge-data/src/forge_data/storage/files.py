"""Files of a corpus, on this machine or behind a URL: which there are, how large they are, what they begin with.

Nothing is opened to list them. A remote file is read in pieces until somebody needs it whole; then it is copied into a
cache on this machine, once.
"""

import glob
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

from forge_core.errors import DataError

_FEW = 16


@dataclass(frozen=True)
class File:
    """One file.

    Attributes:
        name: its path relative to the fixed part of what the user gave: what files are sorted by.
        where: path or URL.
        size: in bytes, when it was listed.
        stamp: changes when the file does, as far as its file system can tell: modification time or etag.
        tagged: the stamp follows from the content, as an etag does and a time does not.
    """

    name: str
    where: str
    size: int
    stamp: str
    tagged: bool = False

    @property
    def remote(self) -> bool:
        return is_url(self.where)

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop), fewer at the end of the file.

        Raises:
            DataError: it cannot be read.
        """
        if self.remote:
            from forge_data.storage.remote import read

            return read(self, start, stop)
        try:
            descriptor = os.open(self.where, os.O_RDONLY)  # a file object triples the time of 10,000 headers
            try:
                return _read(descriptor, start, stop)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise DataError(f"{self.where} cannot be read: {error.strerror}") from error

    def local(self) -> Path:
        """A path on this machine with the whole content.

        Raises:
            DataError: it cannot be fetched.
        """
        if self.remote:
            from forge_data.storage.remote import fetch

            return fetch(self)
        return Path(self.where)


def _read(descriptor: int, start: int, stop: int) -> bytes:
    """One call gives at most 2 GiB, and may give less on some file systems."""
    parts = []
    while start < stop and (part := os.pread(descriptor, stop - start, start)):
        parts.append(part)
        start += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def is_url(path: str) -> bool:
    """Whether a path names a file system: `s3://bucket/file`, `file:///data`."""
    return "://" in path


def find_one(path: str) -> File | None:
    """The file at exactly this path or URL, or None."""
    if is_url(path):
        from forge_data.storage.remote import listed

        return next(iter(listed(path)), None)
    try:
        found = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return _file(os.path.basename(path), path, found) if S_ISREG(found.st_mode) else None  # noqa: PTH119


def neighbours(files: Sequence[File]) -> Callable[[str], File | None]:
    """As `find_one` for files beside `files`: where there are many, each directory is listed once instead."""
    if len(files) < _FEW:
        return find_one
    found: dict[str, File] = {}
    for directory in {file.where.rpartition("/")[0] for file in files}:
        if is_url(directory):
            from forge_data.storage.remote import below

            found |= {file.where: file for file in below(directory)}
            continue
        with os.scandir(directory or ".") as entries:
            for entry in entries:
                if entry.is_file():
                    where = f"{directory}/{entry.name}" if directory else entry.name
                    found[where] = _file(entry.name, where, entry.stat())
    return found.get


def find(path: str, suffixes: Sequence[str], what: str) -> list[File]:
    """The files that a path, directory, pattern or URL names, sorted by name.

    Args:
        path: a file; a directory, searched at any depth for names that end in one of `suffixes`; or a pattern such as
            `corpus/**/*.npy`.
        suffixes: see `path`; a file that is named or matched by a pattern may end in anything.
        what: a word for messages, such as "text".

    Raises:
        DataError: there is none.
    """
    if is_url(path):
        from forge_data.storage.remote import listed

        found = listed(path, suffixes)
    else:
        found = _local(path, suffixes, what)
    if not found:
        raise DataError(f"{path} names no {what} file; a directory is searched for {', '.join(suffixes)}")
    return sorted(found, key=lambda file: file.name)


def _local(path: str, suffixes: Sequence[str], what: str) -> list[File]:
    given = Path(path).expanduser()
    if given.is_file():
        base, paths = str(given.parent), [str(given)]
    elif given.is_dir():
        base = str(given)
        paths = [
            os.path.join(folder, name)  # noqa: PTH118
            for folder, _, names in os.walk(given)
            for name in names
            if name.endswith(tuple(suffixes))
        ]
    elif glob.has_magic(path):
        base = str(_fixed_part(given))
        paths = [file for file in glob.glob(str(given), recursive=True) if Path(file).is_file()]  # noqa: PTH207
    else:
        raise DataError(f"{path} does not exist; give a {what} file, a directory or a pattern such as 'corpus/**/*{suffixes[0]}'")
    files = []
    for file in paths:
        try:
            found = os.stat(file)  # noqa: PTH116
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror}") from error
        files.append(_file(file.removeprefix(base).lstrip("/"), file, found))
    return files


def _file(name: str, where: str, found: os.stat_result) -> File:
    return File(name, where, found.st_size, str(found.st_mtime_ns))


def _fixed_part(pattern: Path) -> Path:
    parts = []
    for part in pattern.parts[:-1]:
        if glob.has_magic(part):
            break
        parts.append(part)
    return Path(*parts)
