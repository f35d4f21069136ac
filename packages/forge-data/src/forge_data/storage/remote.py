"""Files behind URLs, through fsspec, and the cache of whole files on this machine.

A cached file is kept under a name made from its URL, size and stamp, so a file that changed is fetched again and an old
copy is never taken for a new one. The cache is `$FORGE_CACHE`, else `~/.cache/forge`; it may be deleted at any time
between runs.
"""

import glob
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from itertools import takewhile
from pathlib import Path
from secrets import token_hex
from typing import Any

from forge_core.errors import DataError
from forge_core.redaction import redacted_url
from forge_data.storage.file import File

_FETCH_BLOCK = 1 << 24
_TAGS = ("ETag", "etag", "md5Hash", "checksum")


def list_remote(url: str, suffixes: Sequence[str] | None = None) -> list[File]:
    """The files that a URL names.

    Args:
        url: a file, or a pattern.
        suffixes: if given, `url` may also be a directory: all files below it that end in one of them.

    Raises:
        DataError: fsspec or its package for this kind of URL is not installed, or the place cannot be read.
    """
    with _explained(url):
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


def list_remote_directory(url: str) -> list[File]:
    """The files of one directory, not of those inside it.

    Raises:
        DataError: it cannot be listed.
    """
    with _explained(url):
        system, path = _file_system(url)
        found = {info["name"]: info for info in system.ls(path, detail=True) if info["type"] == "file"}
        return [_remote_file(system, name, info, path) for name, info in found.items()]


def read_remote(file: File, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of a remote file, or of its copy in the cache."""
    cached = _cached_path(file)
    if cached.exists():
        with cached.open("rb") as content:
            content.seek(start)
            return content.read(max(0, stop - start))
    with _explained(file.where):
        system, path = _file_system(file.where)
        return bytes(system.cat_file(path, start=start, end=min(stop, file.size)))


def fetch(file: File) -> Path:
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
        with _explained(file.where):
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


def cache() -> Path:
    """Where copies are kept."""
    return Path(os.environ.get("FORGE_CACHE") or Path.home() / ".cache" / "forge")


def _cached_path(file: File) -> Path:
    key = sha256(f"{file.where}\n{file.size}\n{file.stamp}".encode()).hexdigest()
    name = redacted_url(file.where).rpartition("/")[2]
    return cache() / "files" / key[:2] / f"{key[2:34]}-{re.split(r'[?#;]', name)[0]}"  # what follows them may be a secret


def _remote_file(system: Any, name: str, info: dict[str, Any], base: str) -> File:
    where = str(system.unstrip_protocol(name))
    stamp, tagged = _stamp(system, name, info)
    return File(name[len(base) :].lstrip("/"), where, int(info["size"]), stamp, tagged)


def _stamp(system: Any, name: str, info: dict[str, Any]) -> tuple[str, bool]:
    """(stamp, whether it follows from the content)."""
    for key in (*_TAGS, "LastModified", "last_modified", "mtime", "created"):
        if info.get(key):
            return str(info[key]), key in _TAGS
    return str(system.ukey(name)), False


def _file_system(url: str) -> tuple[Any, str]:
    """(file system, path on it); fsspec's own types promise less than it gives."""
    from fsspec.core import url_to_fs

    system, path = url_to_fs(url)
    return system, str(path)


@contextmanager
def _explained(url: str) -> Iterator[None]:
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
