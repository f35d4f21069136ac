"""Files of a corpus, on this machine or behind a URL: listed, and read in pieces or as a whole.

Listing opens no file. A remote file is read in pieces, through fsspec, until its whole content is needed; then it is copied
into a cache on this machine, once. A cached file is kept under a name made from its URL, size and stamp, so a file that
changed is fetched again and an old copy is never taken for a new one. The cache is `$FORGE_CACHE`, else `~/.cache/forge`;
it may be deleted at any time between runs.
"""

import glob
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from secrets import token_hex
from stat import S_ISREG
from typing import Any, TypeVar

from forge_core.errors import DataError
from forge_core.redaction import redacted_url

_FEW = 16
Item = TypeVar("Item")
Found = TypeVar("Found")
_READERS = 16
_LATE = 1e-3
"""Seconds per read from which on several are made at a time."""
_FETCH_BLOCK = 1 << 24
_TAGS = ("ETag", "etag", "md5Hash", "checksum")


@dataclass(frozen=True)
class File:
    """One file.

    Attributes:
        name: its path relative to the fixed part of what the user gave; files are sorted by it.
        where: path or URL.
        size: in bytes, when it was listed.
        stamp: changes when the file does, as far as its file system can tell: modification time or ETag.
        tagged: the stamp follows from the content, as an ETag does and a time does not.
    """

    name: str
    where: str
    size: int
    stamp: str
    tagged: bool = False

    @property
    def remote(self) -> bool:
        """Whether a URL names the file."""
        return is_url(self.where)


def is_url(path: str) -> bool:
    """Whether a path names a file system: `s3://bucket/file`, `file:///data`."""
    return "://" in path


def find(path: str, suffixes: Sequence[str], what: str) -> list[File]:
    """The files that a path, directory, pattern or URL names, sorted by name.

    Args:
        path: a file; a directory, searched at any depth for names that end in one of `suffixes`; or a pattern such as
            `corpus/**/*.npy`.
        suffixes: see `path`; a file that is named or matched by a pattern may end in anything.
        what: a word for messages, such as "text".

    Raises:
        DataError: no file is found, or the path is empty.
    """
    if not path.strip():
        raise DataError(f"the path of {what} files is empty; '.' is the working directory")
    found = _list_remote(path, suffixes) if is_url(path) else _list_local(path, suffixes, what)
    if not found:
        raise DataError(f"{path} matches no {what} file; in a directory, Forge looks for {', '.join(suffixes)}")
    return sorted(found, key=lambda file: file.name)


def find_one(path: str) -> File | None:
    """The file at exactly this path or URL, or None."""
    return next(iter(_list_remote(path)), None) if is_url(path) else _find_local(path)


def neighbors(files: Sequence[File]) -> Callable[[str], File | None]:
    """As `find_one`, for files in the directories of `files`; where there are many, each directory is listed once instead."""
    if len(files) < _FEW:
        return find_one
    found: dict[str, File] = {}
    for directory in {file.where.rpartition("/")[0] for file in files}:
        listed = _list_remote_directory(directory) if is_url(directory) else _list_local_directory(directory)
        found |= {file.where: file for file in listed}
    return found.get


def read_bytes(file: File, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of a file, fewer at its end.

    Raises:
        DataError: the file cannot be read.
    """
    return _read_remote(file, start, stop) if file.remote else _read_local(file, start, stop)


def local_path(file: File) -> Path:
    """A path on this machine with the whole content.

    Raises:
        DataError: the file cannot be fetched.
    """
    return _fetch(file) if file.remote else Path(file.where)


def read_each(read: Callable[[Item], Found], items: Sequence[Item]) -> list[Found]:
    """`read` of every item, in order: one after the other where the file system answers at once, else several at a time."""
    began = time.perf_counter()
    first = [read(item) for item in items[:_READERS]]
    rest = items[_READERS:]
    if time.perf_counter() - began < _LATE * len(first):  # threads would only wait for each other
        return first + [read(item) for item in rest]
    with ThreadPoolExecutor(_READERS, thread_name_prefix="read") as pool:
        return first + list(pool.map(read, rest))


def _list_local(path: str, suffixes: Sequence[str], what: str) -> list[File]:
    """The files that a path, directory or pattern names; see `find`.

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


def _list_local_directory(directory: str) -> list[File]:
    """The files of one directory, without those of its subdirectories."""
    with os.scandir(directory or ".") as entries:
        return [
            _local_file(entry.name, f"{directory}/{entry.name}" if directory else entry.name, entry.stat())
            for entry in entries
            if entry.is_file()
        ]


def _fixed_part(pattern: Path) -> Path:
    parts = []
    for part in pattern.parts[:-1]:
        if glob.has_magic(part):
            break
        parts.append(part)
    return Path(*parts)


def _find_local(path: str) -> File | None:
    """The file at exactly this path, or None."""
    try:
        found = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return _local_file(os.path.basename(path), path, found) if S_ISREG(found.st_mode) else None  # noqa: PTH119


def _local_file(name: str, where: str, found: os.stat_result) -> File:
    return File(name, where, found.st_size, str(found.st_mtime_ns))


def _read_local(file: File, start: int, stop: int) -> bytes:
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


def _list_remote(url: str, suffixes: Sequence[str] | None = None) -> list[File]:
    """The files that a URL names.

    Args:
        url: a file, or a pattern.
        suffixes: if given, `url` may also be a directory: all files below it that end in one of them.

    Raises:
        DataError: fsspec or its package for this kind of URL is not installed, or the place cannot be read.
    """
    with _remote_faults(url):
        system, path = _file_system(url)
        if glob.has_magic(path):
            found = {name: info for name, info in system.glob(path, detail=True).items() if info["type"] == "file"}
            base = "/".join(takewhile(lambda part: not glob.has_magic(part), path.split("/")))
        elif system.isfile(path):
            found, base = {path: system.info(path)}, path.rpartition("/")[0]
        elif suffixes is not None:
            inside = system.find(path, detail=True).items()
            found, base = {name: info for name, info in inside if name.endswith(tuple(suffixes))}, path
        else:
            return []
        return [_remote_file(system, name, info, base) for name, info in found.items()]


def _list_remote_directory(url: str) -> list[File]:
    """The files of one directory, not of those inside it.

    Raises:
        DataError: it cannot be listed.
    """
    with _remote_faults(url):
        system, path = _file_system(url)
        found = {info["name"]: info for info in system.ls(path, detail=True) if info["type"] == "file"}
        return [_remote_file(system, name, info, path) for name, info in found.items()]


def _remote_file(system: Any, name: str, info: dict[str, Any], base: str) -> File:
    where = str(system.unstrip_protocol(name))
    stamp, tagged = _remote_stamp(system, name, info)
    return File(name[len(base) :].lstrip("/"), where, int(info["size"]), stamp, tagged)


def _remote_stamp(system: Any, name: str, info: dict[str, Any]) -> tuple[str, bool]:
    """(stamp, whether it follows from the content)."""
    for key in (*_TAGS, "LastModified", "last_modified", "mtime", "created"):
        if info.get(key):
            return str(info[key]), key in _TAGS
    return str(system.ukey(name)), False


def _read_remote(file: File, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of a remote file, or of its copy in the cache."""
    cached = _cached_path(file)
    if cached.exists():
        with cached.open("rb") as content:
            content.seek(start)
            return content.read(max(0, stop - start))
    with _remote_faults(file.where):
        system, path = _file_system(file.where)
        return bytes(system.cat_file(path, start=start, end=min(stop, file.size)))


def _fetch(file: File) -> Path:
    """The copy of a remote file in the cache, made when it is not there yet; safe between processes.

    Raises:
        DataError: it cannot be read, has another size than when it was listed, or the cache cannot be written.
    """
    place = _cached_path(file)
    if place.exists():
        return place
    partial = place.with_name(f"{place.name}.partial-{token_hex(4)}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _remote_faults(file.where):
            system, path = _file_system(file.where)
            with system.open(path, "rb") as source, partial.open("wb") as target:
                size = 0
                while block := source.read(_FETCH_BLOCK):
                    size += len(block)  # type: ignore[arg-type]
                    target.write(block)  # type: ignore[arg-type]
        if size != file.size:
            raise DataError(f"{file.where} had {file.size} bytes and now has {size}; it was changed while it was read")
        partial.replace(place)
    except OSError as error:
        raise DataError(f"the cache {place.parent} cannot be written: {error.strerror}; set FORGE_CACHE") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    return place


def _cached_path(file: File) -> Path:
    key = sha256(f"{file.where}\n{file.size}\n{file.stamp}".encode()).hexdigest()
    name = redacted_url(file.where).rpartition("/")[2]
    return (
        cache_directory() / "files" / key[:2] / f"{key[2:34]}-{re.split(r'[?#;]', name)[0]}"
    )  # what follows them may be a secret


def cache_directory() -> Path:
    """Where copies are kept."""
    return Path(os.environ.get("FORGE_CACHE") or Path.home() / ".cache" / "forge")


def _file_system(url: str) -> tuple[Any, str]:
    """(file system, path on it); fsspec's own types promise less than it gives."""
    from fsspec.core import url_to_fs

    system, path = url_to_fs(url)
    return system, str(path)


@contextmanager
def _remote_faults(url: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        package = "" if "fsspec" in str(error) and error.name == "fsspec" else f" ({error})"
        raise DataError(
            f"{url} needs fsspec and its package for this kind of URL{package}; pip install 'forge-data[remote]'"
        ) from error
    except DataError:
        raise
    except (OSError, ValueError) as error:  # also what fsspec raises for an unknown protocol
        raise DataError(f"{url} cannot be read: {error}") from error
