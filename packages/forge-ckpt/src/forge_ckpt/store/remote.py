"""A checkpoint store in object storage, where writing one object is atomic but a rename is not.

    files/NAME             a file of the store, such as `latest`
    data/DIRECTORY/FILE    a file, below the original name of its directory
    names/DIRECTORY        the current name of a directory; contains one line with the original name

Renaming a directory does not move its files: it writes an object with the new name and then deletes the object with the former
name. So a checkpoint is committed by writing one object, the last of its save. A directory without such an object is unfinished
and is removed like on a local disk. A job that dies between the two steps leaves two names for the same files; the files are
removed together with their last name.
"""

import errno
from collections.abc import Iterable, Sequence
from typing import Any

from forge_ckpt.format.names import is_safe
from forge_ckpt.store.local import MARKER
from forge_ckpt.store.objects import Objects
from forge_core.errors import CheckpointError

FILES, DATA, NAMES = "files", "data", "names"


class RemoteStore:
    """Checkpoint files below a URL, through fsspec: `s3://bucket/runs/x/checkpoints`.

    A file is uploaded in parts and becomes visible after the last part. The store relies on the server that acknowledged writes
    are durable and immediately visible to all, as S3 and the storage of Google and Microsoft guarantee.

    Args:
        url: URL of the folder.
        pause: seconds before the first retry after a transient error; doubles for each retry.

    Raises:
        CheckpointError: `url` is not the URL of a folder.
    """

    def __init__(self, url: str, *, pause: float = 0.5) -> None:
        self._objects = Objects(url, pause)
        self.root = self._objects.url
        self._prepared = False
        self._known: dict[str, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_known": {}}

    @property
    def retries(self) -> int:
        """Number of retries."""
        return self._objects.retries

    def prepare(self) -> None:
        """Writes the marker of the store; called by the first write, or earlier as a check before a run.

        Raises:
            CheckpointError: the marker cannot be written, or the folder has other objects.
        """
        if self._prepared:
            return
        try:
            if not self._is_marked():
                others = self._objects.children("")
                # Another rank may have put the marker and files since: only then are they expected.
                if others and not self._is_marked():
                    raise CheckpointError(
                        f"{self.root} holds other objects ({', '.join(sorted(others)[:3])}, ...): "
                        "use an empty folder or a folder of checkpoints"
                    )
                self._objects.put(f"{FILES}/{MARKER}", b"forge-ckpt removes what it wrote here and no longer needs.\n")
        except OSError as cause:
            raise CheckpointError(
                f"checkpoints cannot be written to {self.root}: {cause}; check that the bucket exists and you may write to it"
            ) from cause
        self._prepared = True

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        self.prepare()
        self._objects.stream(self._key(path), chunks)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        key = self._key(path)
        if length is None:
            return self._objects.get(key)[offset:]
        buffer = bytearray(length)
        self._objects.read_into(key, offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fills a buffer; uses the location of the directory that an earlier `size` or `read` has looked up, if any."""
        key = self._key(path, again=False)
        try:
            self._objects.read_into(key, offset, buffer, ahead="/" in path)
        except FileNotFoundError:
            if (moved := self._key(path)) == key:
                raise
            self._objects.read_into(moved, offset, buffer, ahead="/" in path)

    def size(self, path: str) -> int:
        try:
            return self._objects.size(self._key(path))
        except IsADirectoryError as cause:
            raise CheckpointError(f"{path} is not a file") from cause

    def free(self) -> None:
        """Returns None: object storage does not report free space."""
        return

    def rename(self, source: str, target: str) -> None:
        self.prepare()
        old, new, names = _checked(source), _checked(target), self._names()
        if new in names or (new not in names.values() and self._objects.children(f"{DATA}/{new}")):
            raise FileExistsError(errno.EEXIST, "not replaced", target)
        data = names.get(old)
        if data is None and old not in names.values() and self._objects.children(f"{DATA}/{old}"):
            data = old
        if data is None:
            key = self._key(old)
            self._objects.put(self._key(new), self._objects.get(key))  # a small file, such as `latest`
            self._objects.delete(key)
            return
        if self._is_object(self._key(new)):
            raise FileExistsError(errno.EEXIST, "not replaced", target)
        self._name(new, data)
        if old in names:
            self._objects.delete(f"{NAMES}/{old}")

    def list(self, path: str = "") -> Sequence[str]:
        at, names = _checked(path) if path else "", self._names()
        if at in names:
            return sorted(self._objects.children(f"{DATA}/{names[at]}"))
        below, moved = f"{at}/" if at else "", set(names.values())
        found = {name[len(below) :].partition("/")[0] for name in names if name.startswith(below)}
        if at not in moved:
            inside = self._objects.children(f"{DATA}/{at}" if at else DATA)
            found |= {name for name in inside if below + name not in moved}
        return sorted(found if at else found | set(self._objects.children(FILES)))

    def remove(self, path: str) -> None:
        at = _checked(path)
        if not self._is_marked():
            raise CheckpointError(f"nothing is removed from {self.root}: the object {FILES}/{MARKER} is missing")
        names, key = self._names(), self._key(at)
        data = names.pop(at, None)
        if data is not None:
            self._objects.delete(f"{NAMES}/{at}")  # first, because a directory without a name is not a checkpoint
        folder, kept = f"{DATA}/{data or at}", tuple(f"{DATA}/{other}/" for other in names.values())  # files of other names
        self._objects.delete(*(found for found in self._objects.below(folder) if not found.startswith(kept)))
        if left := [found for found in self._objects.below(folder) if not found.startswith(kept)]:
            raise OSError(errno.EACCES, f"{len(left)} objects could not be deleted", f"{self.root}/{left[0]}")
        if data is None and self._is_object(key):
            self._objects.delete(key)

    def _name(self, name: str, data: str) -> None:
        """Names a directory by writing one object."""
        key, line = f"{NAMES}/{name}", f"{data}\n".encode()
        try:
            self._objects.put(key, line, new=True)
        except FileExistsError:
            if _first_name(self._objects.get(key)) is not None:
                raise
            self._objects.put(key, line)  # if writes are not atomic, an earlier one may be incomplete

    def _names(self) -> dict[str, str]:
        """Returns the original name of each named directory, by its current name."""
        names = {}
        for key in self._objects.below(NAMES):
            try:
                data = _first_name(self._objects.get(key))
            except FileNotFoundError:  # deleted meanwhile
                continue
            if data is not None:
                names[key.removeprefix(f"{NAMES}/")] = data
        return names

    def _is_marked(self) -> bool:
        return MARKER in self._objects.children(FILES)

    def _is_object(self, key: str) -> bool:
        try:
            self._objects.size(key)
        except (FileNotFoundError, IsADirectoryError):
            return False
        return True

    def _key(self, path: str, again: bool = True) -> str:
        """Returns the key of the object that holds a file."""
        parent, _, name = _checked(path).rpartition("/")
        if not parent:
            return f"{FILES}/{name}"
        if again or parent not in self._known:
            try:
                first = _first_name(self._objects.get(f"{NAMES}/{parent}"))
            except (FileNotFoundError, IsADirectoryError):
                first = None
            self._known[parent] = first or parent
        return f"{DATA}/{self._known[parent]}/{name}"


def _first_name(line: bytes) -> str | None:
    """Returns the original name of a directory; None for an incomplete line."""
    text = line.decode("ascii", errors="replace")
    data = text.removesuffix("\n")
    return data if text.endswith("\n") and all(is_safe(part) for part in data.split("/")) else None


def _checked(path: str) -> str:
    if not all(is_safe(part) for part in path.split("/")):
        raise CheckpointError(f"{path!r} is not a valid path in a checkpoint store")
    return path
