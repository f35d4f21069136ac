"""Files of this machine: listed and read."""

import glob
import os
from collections.abc import Sequence
from pathlib import Path
from stat import S_ISREG

from forge_core.errors import DataError
from forge_data.storage.file import File


def read_local(file: File, start: int, stop: int) -> bytes:
    """Bytes [start, stop), fewer at the end of the file.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        descriptor = os.open(file.where, os.O_RDONLY)  # a file object triples the time of 10,000 headers
        try:
            return _read_descriptor(descriptor, start, stop)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DataError(f"{file.where} cannot be read: {error.strerror}") from error


def _read_descriptor(descriptor: int, start: int, stop: int) -> bytes:
    """One call gives at most 2 GiB, and may give less on some file systems."""
    parts = []
    while start < stop and (part := os.pread(descriptor, stop - start, start)):
        parts.append(part)
        start += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def find_local(path: str) -> File | None:
    """The file at exactly this path, or None."""
    try:
        found = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return _local_file(os.path.basename(path), path, found) if S_ISREG(found.st_mode) else None  # noqa: PTH119


def list_local_directory(directory: str) -> list[File]:
    """The files of one directory, without those of its subdirectories."""
    with os.scandir(directory or ".") as entries:
        return [
            _local_file(entry.name, f"{directory}/{entry.name}" if directory else entry.name, entry.stat())
            for entry in entries
            if entry.is_file()
        ]


def list_local(path: str, suffixes: Sequence[str], what: str) -> list[File]:
    """The files that a path, directory or pattern names; see `files.find`.

    Raises:
        DataError: the path does not exist, or a file cannot be read.
    """
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
        files.append(_local_file(file.removeprefix(base).lstrip("/"), file, found))
    return files


def _local_file(name: str, where: str, found: os.stat_result) -> File:
    return File(name, where, found.st_size, str(found.st_mtime_ns))


def _fixed_part(pattern: Path) -> Path:
    parts = []
    for part in pattern.parts[:-1]:
        if glob.has_magic(part):
            break
        parts.append(part)
    return Path(*parts)
