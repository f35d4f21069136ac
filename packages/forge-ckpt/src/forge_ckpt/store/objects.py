"""Objects below a URL, through fsspec, with retries after transient errors of network and server."""

import errno
import inspect
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from forge_core.errors import CheckpointError
from forge_core.redaction import redacted_text

ATTEMPTS = 3
"""Number of attempts, besides the retries of the file system itself: s3fs and its library retry several times."""

_PASSING = {
    *(errno.EIO, errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT, errno.ESTALE, errno.EPIPE, None),
    *(errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EHOSTUNREACH, errno.ENETUNREACH),
    *([errno.EREMOTEIO] if hasattr(errno, "EREMOTEIO") else []),  # from s3fs after an internal error of the server
}
_LASTING = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError, CheckpointError)
_NETWORK = {
    "HTTPClientError",
    "ConnectionError",
    "ClientConnectionError",
    "ClientPayloadError",
    "ServiceRequestError",
    "HttpError",
}
"""Names of exceptions from the libraries of file systems that are not subclasses of `OSError`."""

T = TypeVar("T")


def may_pass(cause: Exception) -> bool:
    """Whether an error is transient, so that a retry may succeed."""
    if isinstance(cause, _LASTING):
        return False
    if isinstance(cause, OSError):
        return cause.errno in _PASSING
    return any(kind.__name__ in _NETWORK for kind in type(cause).__mro__)


def repeated(action: Callable[[], T], attempts: int, pause: float, note: Callable[[], None], where: str) -> T:
    """Runs an action with retries, and returns its result.

    Args:
        action: the action.
        attempts: maximum number of attempts.
        pause: seconds before the first retry; doubles for each retry.
        note: called before each retry.
        where: the URL, for messages.

    Raises:
        OSError: the error of the last attempt.
        CheckpointError: the error of the last attempt; errors of other types are converted.
    """
    for attempt in range(attempts):
        try:
            return action()
        except Exception as cause:
            if may_pass(cause) and attempt < attempts - 1:
                note()
                time.sleep(pause * 2**attempt)
            elif isinstance(cause, OSError | CheckpointError):
                raise
            else:
                raise CheckpointError(f"{where}: {type(cause).__name__}: {redacted_text(str(cause))}") from cause
    raise AssertionError("the last attempt returns or raises")


EXTRA = "pip install 'forge-ckpt[remote]'"


def is_url(where: object) -> bool:
    """Whether a text is a URL such as `s3://bucket/runs`."""
    return "://" in str(where)


def check_url(url: str) -> None:
    """Checks that a URL is a folder in object storage.

    Raises:
        ValueError: it is not; the message says what to use instead.
    """
    scheme, found, rest = url.partition("://")
    if not found or not scheme or not rest.strip("/"):
        raise ValueError(f"{url!r} is not the URL of a folder, such as s3://bucket/runs")
    if "::" in url or any(sign in rest for sign in "*[]#"):
        raise ValueError(f"{redacted_text(url)!r} is a chain or a pattern; use the URL of one folder")
    if "@" in rest or "?" in url:
        raise ValueError(f"{redacted_text(url)!r} has a place for credentials; set them in the environment instead")
    if scheme in ("file", "local"):
        raise ValueError(f"{url!r} is a folder of this machine; use the store 'local', which flushes files to disk")


def open_url(url: str) -> tuple[Any, str]:
    """Returns (file system, path on it). Listings are not cached, because other ranks also write.

    Raises:
        CheckpointError: fsspec or its package for this kind of URL is not installed, or the protocol is unknown.
    """
    try:
        from fsspec.core import url_to_fs

        system, path = url_to_fs(url, use_listings_cache=False)
    except ImportError as cause:
        package = "" if cause.name == "fsspec" else f" ({cause})"
        raise CheckpointError(
            f"{url} needs fsspec and its package for this kind of URL{package}; {EXTRA} has those of s3"
        ) from cause
    except ValueError as cause:  # an unknown protocol
        raise CheckpointError(f"{url} cannot be opened: {cause}") from cause
    return system, str(path).rstrip("/")


PART_BYTES = 32 << 20
"""Bytes per part of an upload, which needs about twice this amount of memory."""
AHEAD_BYTES = 16 << 20
"""Maximum number of bytes per request when an object is read sequentially."""

_SMALL = 1 << 20


class Objects:
    """Objects by keys below a URL, such as `data/rank-00000.bin`.

    Attributes:
        url: URL without a trailing `/`.
        retries: number of retries, without those of the file system itself.

    Args:
        url: URL of the folder.
        pause: seconds before the first retry; doubles for each retry.

    Raises:
        CheckpointError: `check_url` refuses the URL.
    """

    def __init__(self, url: str, pause: float) -> None:
        try:
            check_url(url)
        except ValueError as cause:
            raise CheckpointError(str(cause)) from cause
        self.url = url.rstrip("/")
        self.retries = 0
        self._pause = pause
        self._opened: tuple[Any, str] | None = None
        self._ahead = _Ahead()

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the file system: its connections and threads belong to one process. Another process opens it again."""
        return {"url": self.url, "pause": self._pause}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def stream(self, key: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Writes an object in parts; it becomes visible after the last part. If `chunks` can be iterated again, a transient error
        restarts the upload."""

        def once() -> None:
            system, path = self._at(key)
            file = system.open(path, "wb", block_size=PART_BYTES)
            try:
                for chunk in chunks:
                    file.write(memoryview(chunk).cast("B"))
                file.close()
            except BaseException:
                _give_up(file)
                raise

        self._repeat(once, ATTEMPTS if iter(chunks) is not chunks else 1)

    def put(self, key: str, data: bytes, *, new: bool = False) -> None:
        """Writes a small object with one request; replaces an existing one.

        Args:
            key: key of the object.
            data: its content.
            new: never replaces an object. S3 and Google's storage guarantee this; on other servers the object is checked before
                the write, so of two simultaneous writers the later one would win.

        Raises:
            FileExistsError: with `new`, the object exists.
        """

        def once() -> None:
            system, path = self._at(key)
            if new:
                _create(system, path, data)
            else:
                system.pipe_file(path, data)

        try:
            self._repeat(once)
        except Exception:
            if not self._holds(key, data):  # the write may have succeeded although the response was lost
                raise

    def get(self, key: str) -> bytes:
        """Returns a whole object, with one request per MiB.

        Raises:
            FileNotFoundError: the object does not exist.
        """
        parts = [self._range(key, 0, _SMALL)]
        while len(parts[-1]) == _SMALL:
            parts.append(self._range(key, len(parts) * _SMALL, (len(parts) + 1) * _SMALL))
        return b"".join(parts)

    def read_into(self, key: str, offset: int, buffer: memoryview, *, ahead: bool = False) -> None:
        """Fills a buffer from an object.

        Args:
            key: key of the object.
            offset: first byte to read.
            buffer: the buffer to fill.
            ahead: reads ahead for the next call of this thread if calls are sequential; only for objects that never change.

        Raises:
            FileNotFoundError: the object does not exist.
            CheckpointError: the object is too short.
        """
        wanted, kept = len(buffer), self._ahead
        if not wanted:
            self.size(key)
            return
        at = offset - kept.start
        follows = ahead and kept.key == key and 0 <= at <= len(kept.data)
        if not follows or at + wanted > len(kept.data):
            more = min(2 * len(kept.data), AHEAD_BYTES) if follows else 0
            data, at = self._range(key, offset, offset + max(wanted, more)), 0
            if len(data) < wanted:
                raise CheckpointError(f"{key} ends at byte {offset + len(data)}, before byte {offset + wanted}")
            if not ahead:
                buffer[:] = data
                return
            kept.key, kept.start, kept.data = key, offset, data
        buffer[:] = memoryview(kept.data)[at : at + wanted]

    def size(self, key: str) -> int:
        """Returns the size of an object in bytes, and discards the data that this thread has read ahead.

        Raises:
            FileNotFoundError: the object does not exist.
            IsADirectoryError: the key is a folder.
        """

        def once() -> dict[str, Any]:
            system, path = self._fresh(key)
            return system.info(path)

        self._ahead.key = ""
        info = self._repeat(once)
        if info["type"] != "file":
            raise IsADirectoryError(errno.EISDIR, "not an object", key)
        return int(info["size"])

    def children(self, key: str) -> list[str]:
        """Returns the names directly below a key; empty if there are none."""

        def once() -> list[str]:
            system, path = self._fresh(key)
            try:
                names = [str(row["name"]).strip("/") for row in system.ls(path, detail=True)]
            except FileNotFoundError:
                return []
            return [name.rpartition("/")[2] for name in names if name != path.strip("/")]

        return self._repeat(once)

    def below(self, key: str) -> list[str]:
        """Returns the keys of all objects below a key."""

        def once() -> list[str]:
            system, path = self._fresh(key)
            try:
                names = [str(name).strip("/") for name in system.find(path)]
            except FileNotFoundError:
                return []
            start = f"{path.strip('/')}/"
            return [f"{key}/{name.removeprefix(start)}" for name in names if name.startswith(start)]

        return self._repeat(once)

    def delete(self, *keys: str) -> None:
        """Deletes objects; ignores those that do not exist."""

        def once() -> None:
            system = self._at("")[0]
            paths = [self._at(key)[1] for key in keys]
            try:
                if len(paths) == 1:
                    system.rm_file(paths[0])
                else:
                    system.rm(paths)
            except FileNotFoundError:
                if left := [path for path in paths if system.exists(path)]:
                    system.rm(left)

        if keys:
            self._repeat(once)

    def _range(self, key: str, start: int, stop: int) -> bytes:
        def once() -> bytes:
            system, path = self._at(key)
            try:
                return bytes(system.cat_file(path, start=start, end=stop))
            except OSError as cause:
                if cause.errno == errno.EINVAL:  # from s3fs if a range begins after the end
                    return b""
                raise

        return self._repeat(once)

    def _holds(self, key: str, data: bytes) -> bool:
        try:
            return self.get(key) == data
        except Exception:  # noqa: BLE001 (the caller raises the first error)
            return False

    def _fresh(self, key: str) -> tuple[Any, str]:
        system, path = self._at(key)
        system.invalidate_cache()
        return system, path

    def _at(self, key: str) -> tuple[Any, str]:
        """Returns (file system, path on it)."""
        if self._opened is None:
            self._opened = open_url(self.url)
        system, base = self._opened
        return system, f"{base}/{key}" if key else base

    def _repeat(self, action: Callable[[], T], attempts: int = ATTEMPTS) -> T:
        return repeated(action, attempts, self._pause, self._note, self.url)

    def _note(self) -> None:
        self.retries += 1


class _Ahead(threading.local):
    """Data that one thread has read ahead: `data` begins at byte `start` of object `key`."""

    key = ""
    start = 0
    data = b""


def _create(system: Any, path: str, data: bytes) -> None:
    """Creates an object; uses a conditional request if file system and server support it."""
    put = getattr(system, "_pipe_file", None) or system.pipe_file
    if "mode" in inspect.signature(put).parameters:
        try:
            system.pipe_file(path, data, mode="create")
            return
        except OSError as cause:
            if cause.errno not in (errno.ENOSYS, errno.EOPNOTSUPP):
                raise
    if system.exists(path):
        raise FileExistsError(errno.EEXIST, "not replaced", path)
    system.pipe_file(path, data)


def _give_up(file: Any) -> None:
    """Aborts an upload: discards its parts, so that closing the file later does not complete it."""
    with suppress(Exception):
        file.closed = True
    with suppress(Exception):
        file.discard()
