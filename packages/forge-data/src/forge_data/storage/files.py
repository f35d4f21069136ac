"""Lists and reads local and remote files of a corpus.

Listing opens no file. A remote file is read in pieces, through fsspec, until its whole content is needed; then it is copied
into a local cache, once. The name of a cached file depends on URL, size and stamp, so a changed file is downloaded again and
an old copy is never used for it. The cache is `$FORGE_CACHE`, else `~/.cache/forge`; it may be deleted at any time between
runs.
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
"""Seconds per read above which several reads run in parallel."""
_FETCH_BLOCK = 1 << 24
_TAGS = ("ETag", "etag", "md5Hash", "checksum")


@dataclass(frozen=True)
class File:
    """One file.

    Attributes:
        name: path relative to the fixed part of the path or pattern of the source; files are sorted by it.
        where: path or URL.
        size: size in bytes when the file was listed.
        stamp: ETag or modification time; changes with the file.
        tagged: whether the stamp depends on the content (ETag, checksum) and not on a time.
    """

    name: str
    where: str
    size: int
    stamp: str
    tagged: bool = False

    @property
    def remote(self) -> bool:
        """Whether `where` is a URL."""
        return is_url(self.where)


def is_url(path: str) -> bool:
    """Whether a path is a URL such as `s3://bucket/file` or `file:///data`."""
    return "://" in path


def find(path: str, suffixes: Sequence[str], what: str) -> list[File]:
    """Returns the files that a path, directory, pattern or URL names, sorted by name.

    Args:
        path: a file; a directory, searched at any depth for names that end in one of `suffixes`; or a pattern such as
            `corpus/**/*.npy`.
        suffixes: see `path`; files that are named or match a pattern may have any suffix.
        what: kind of the files for messages, such as "text".

    Raises:
        DataError: no file is found, or the path is empty.
    """
    if not path.strip():
        raise DataError(f"the path of the {what} files is empty; use '.' for the working directory")
    files = _list_remote(path, suffixes) if is_url(path) else _list_local(path, suffixes, what)
    if not files:
        raise DataError(f"{path} matches no {what} file; in a directory, Forge looks for {', '.join(suffixes)}")
    return sorted(files, key=lambda file: file.name)


def find_one(path: str) -> File | None:
    """Returns the file at exactly this path or URL, or None."""
    return next(iter(_list_remote(path)), None) if is_url(path) else _find_local(path)


def neighbors(files: Sequence[File]) -> Callable[[str], File | None]:
    """Returns a `find_one` for files in the directories of `files`; it lists each directory once if there are many files."""
    if len(files) < _FEW:
        return find_one
    by_path: dict[str, File] = {}
    for directory in {file.where.rpartition("/")[0] for file in files}:
        listed = _list_remote_directory(directory) if is_url(directory) else _list_local_directory(directory)
        by_path |= {file.where: file for file in listed}
    return by_path.get


def read_bytes(file: File, start: int, stop: int) -> bytes:
    """Returns bytes [start, stop) of a file, fewer at its end.

    Raises:
        DataError: the file cannot be read.
    """
    return _read_remote(file, start, stop) if file.remote else _read_local(file, start, stop)


def local_path(file: File) -> Path:
    """Returns a local path with the whole content; downloads a remote file.

    Raises:
        DataError: the file cannot be downloaded.
    """
    return _fetch(file) if file.remote else Path(file.where)


def read_each(read: Callable[[Item], Found], items: Sequence[Item]) -> list[Found]:
    """Returns `read(item)` for every item, in order; reads run in parallel if the file system is slow."""
    began = time.perf_counter()
    first = [read(item) for item in items[:_READERS]]
    rest = items[_READERS:]
    if time.perf_counter() - began < _LATE * len(first):  # threads would be slower
        return first + [read(item) for item in rest]
    with ThreadPoolExecutor(_READERS, thread_name_prefix="read") as pool:
        return first + list(pool.map(read, rest))


def _list_local(path: str, suffixes: Sequence[str], what: str) -> list[File]:
    """Returns the files that a path, directory or pattern names; see `find`.

    Raises:
        DataError: the path does not exist, or a file cannot be read.
    """
    expanded = Path(path).expanduser()
    if expanded.is_file():
        base, paths = str(expanded.parent), [str(expanded)]
    elif expanded.is_dir():
        base = str(expanded)
        paths = [
            os.path.join(folder, name)  # noqa: PTH118
            for folder, _, names in os.walk(expanded)
            for name in names
            if name.endswith(tuple(suffixes))
        ]
    elif glob.has_magic(path):
        base = str(_fixed_part(expanded))
        paths = [file for file in glob.glob(str(expanded), recursive=True) if Path(file).is_file()]  # noqa: PTH207
    else:
        raise DataError(f"{path} does not exist; set a {what} file, a directory or a pattern such as 'corpus/**/*{suffixes[0]}'")
    files = []
    for file in paths:
        try:
            status = os.stat(file)  # noqa: PTH116
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror}") from error
        files.append(_local_file(file.removeprefix(base).lstrip("/"), file, status))
    return files


def _list_local_directory(directory: str) -> list[File]:
    """Returns the files of one directory, without its subdirectories."""
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
    """Returns the file at exactly this path, or None."""
    try:
        status = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return _local_file(os.path.basename(path), path, status) if S_ISREG(status.st_mode) else None  # noqa: PTH119


def _local_file(name: str, where: str, status: os.stat_result) -> File:
    return File(name, where, status.st_size, str(status.st_mtime_ns))


def _read_local(file: File, start: int, stop: int) -> bytes:
    """Returns bytes [start, stop), fewer at the end of the file.

    Raises:
        DataError: the file cannot be read.
    """
    try:
        descriptor = os.open(file.where, os.O_RDONLY)  # file objects triple the time to read 10,000 headers
        try:
            return _read_descriptor(descriptor, start, stop)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DataError(f"{file.where} cannot be read: {error.strerror}") from error


def _read_descriptor(descriptor: int, start: int, stop: int) -> bytes:
    """Reads in a loop: one call returns at most 2 GiB, and on some file systems less."""
    parts = []
    while start < stop and (part := os.pread(descriptor, stop - start, start)):
        parts.append(part)
        start += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _list_remote(url: str, suffixes: Sequence[str] | None = None) -> list[File]:
    """Returns the files that a URL names.

    Args:
        url: a file, or a pattern.
        suffixes: if set, `url` may also be a directory: all files below it that end in one of these suffixes.

    Raises:
        DataError: fsspec or its package for this kind of URL is not installed, or the URL cannot be read.
    """
    with _remote_faults(url):
        system, path = _file_system(url)
        if glob.has_magic(path):
            infos = {name: info for name, info in system.glob(path, detail=True).items() if info["type"] == "file"}
            base = "/".join(takewhile(lambda part: not glob.has_magic(part), path.split("/")))
        elif system.isfile(path):
            infos, base = {path: system.info(path)}, path.rpartition("/")[0]
        elif suffixes is not None:
            inside = system.find(path, detail=True).items()
            infos, base = {name: info for name, info in inside if name.endswith(tuple(suffixes))}, path
        else:
            return []
        return [_remote_file(system, name, info, base) for name, info in infos.items()]


def _list_remote_directory(url: str) -> list[File]:
    """Returns the files of one directory, without its subdirectories.

    Raises:
        DataError: the directory cannot be listed.
    """
    with _remote_faults(url):
        system, path = _file_system(url)
        infos = {info["name"]: info for info in system.ls(path, detail=True) if info["type"] == "file"}
        return [_remote_file(system, name, info, path) for name, info in infos.items()]


def _remote_file(system: Any, name: str, info: dict[str, Any], base: str) -> File:
    where = str(system.unstrip_protocol(name))
    stamp, tagged = _remote_stamp(system, name, info)
    return File(name[len(base) :].lstrip("/"), where, int(info["size"]), stamp, tagged)


def _remote_stamp(system: Any, name: str, info: dict[str, Any]) -> tuple[str, bool]:
    """Returns (stamp, whether the stamp depends on the content)."""
    for key in (*_TAGS, "LastModified", "last_modified", "mtime", "created"):
        if info.get(key):
            return str(info[key]), key in _TAGS
    return str(system.ukey(name)), False


def _read_remote(file: File, start: int, stop: int) -> bytes:
    """Returns bytes [start, stop) of a remote file or of its cached copy."""
    cached = _cached_path(file)
    if cached.exists():
        with cached.open("rb") as content:
            content.seek(start)
            return content.read(max(0, stop - start))
    with _remote_faults(file.where):
        system, path = _file_system(file.where)
        return bytes(system.cat_file(path, start=start, end=min(stop, file.size)))


def _fetch(file: File) -> Path:
    """Returns the cached copy of a remote file; downloads it at the first call. Safe between processes.

    Raises:
        DataError: the file cannot be read, its size has changed since it was listed, or the cache is not writable.
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
            raise DataError(f"{file.where} had {file.size} bytes and now has {size}: it changed while it was read; start again")
        partial.replace(place)
    except OSError as error:
        raise DataError(
            f"the cache {place.parent} cannot be written: {error.strerror}; set FORGE_CACHE to a writable directory"
        ) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
    return place


def _cached_path(file: File) -> Path:
    key = sha256(f"{file.where}\n{file.size}\n{file.stamp}".encode()).hexdigest()
    name = redacted_url(file.where).rpartition("/")[2]
    return (
        cache_directory() / "files" / key[:2] / f"{key[2:34]}-{re.split(r'[?#;]', name)[0]}"
    )  # a query or fragment may contain a secret


def cache_directory() -> Path:
    """Returns the directory of cached copies."""
    return Path(os.environ.get("FORGE_CACHE") or Path.home() / ".cache" / "forge")


def _file_system(url: str) -> tuple[Any, str]:
    """Returns (file system, path on it)."""
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
    except (OSError, ValueError) as error:  # fsspec raises ValueError for an unknown protocol
        raise DataError(f"{url} cannot be read: {error}") from error
