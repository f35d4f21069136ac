"""A file system of objects in memory whose process dies before one of the requests that change something."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem


class Killed(BaseException):
    """What a SIGKILL leaves: nothing of the process runs after it."""


class Dying(MemoryFileSystem):
    """Objects below `dying://`, the same for every instance.

    Attributes:
        at: before which request to die; None for never.
        done: requests so far that changed something.
        torn: a request that is not carried out leaves half of its object, as on a file system where a put is not atomic.
        fails: called with (operation, path) before each request, reads included; may raise.
    """

    protocol = "dying"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    cachable = False
    at: int | None = None
    done = 0
    torn = False
    fails = staticmethod(lambda operation, path: None)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).replace("dying://", "memory://", 1))

    @classmethod
    def change(cls, operation: str, path: str, data: bytes = b"") -> None:
        cls.fails(operation, path)
        if cls.done == cls.at:
            if cls.torn and data:
                cls.store[path] = MemoryFile(None, path, data[: len(data) // 2])
            raise Killed
        cls.done += 1

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        path = self._strip_protocol(path)
        if mode == "create" and path in self.store:
            raise FileExistsError(path)
        self.change("put", path, value)
        self.store[path] = MemoryFile(self, path, bytes(value))

    def rm_file(self, path: str) -> None:
        path = self._strip_protocol(path)
        self.change("delete", path)
        super().rm_file(path)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        for each in path if isinstance(path, list) else [path]:
            self.rm_file(each)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        path = self._strip_protocol(path)
        self.fails("get", path)
        if path not in self.store:
            raise FileNotFoundError(path)
        return self.store[path].getvalue()[start:end]

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        assert mode == "wb"
        return Upload(self, path)


class Upload(io.BytesIO):
    """An object that is there when it is closed, or half of it if the process dies before."""

    def __init__(self, system: Dying, path: str) -> None:
        super().__init__()
        self.system, self.path = system, path

    def write(self, data: Any) -> int:
        self.system.change("part", self.path, self.getvalue())
        return super().write(data)

    def close(self) -> None:
        if not self.closed:
            data = self.getvalue()
            self.system.change("put", self.path, data)
            self.system.store[self.path] = MemoryFile(self.system, self.path, data)
            super().close()

    def discard(self) -> None:
        super().close()


@contextmanager
def dying() -> Iterator[type[Dying]]:
    """The class, known to fsspec, with no object."""
    fsspec.register_implementation("dying", Dying, clobber=True)
    Dying.at, Dying.done, Dying.torn, Dying.fails = None, 0, False, staticmethod(lambda operation, path: None)
    Dying.store.clear()
    try:
        yield Dying
    finally:
        Dying.store.clear()
        Dying.at = None


def objects() -> dict[str, bytes]:
    """Contents by path."""
    return {path: file.getvalue() for path, file in Dying.store.items()}


def put_back(contents: dict[str, bytes]) -> None:
    """Exactly these objects."""
    Dying.store.clear()
    Dying.store.update({path: MemoryFile(None, path, data) for path, data in contents.items()})
