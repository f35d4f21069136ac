"""A checkpoint store in a directory: durable, atomic, and safe against symlinks.

Every file is opened relative to the descriptor of its directory with `O_NOFOLLOW`, so neither a name in a manifest nor a symlink
in the directory can lead outside. A name is one component of letters, digits, `_`, `.` and `-`.
"""

import errno
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from forge_ckpt.format.names import is_safe
from forge_core.errors import CheckpointError

MARKER = "forge-checkpoints"
"""A file at the root that marks a directory of checkpoints. Without it, nothing in the directory is removed."""

_TRANSIENT = {errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT}
_NO_LINK = {errno.EPERM, errno.EACCES, errno.EXDEV, errno.EMLINK, errno.ENOENT, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
"""Errors if a file cannot be linked: no support for links, too many links, or the file does not exist."""
_ATTEMPTS = 5
_WRITE_BYTES = 8 << 20
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

T = TypeVar("T")


def _ignore(operation: str, path: str) -> None:
    """The default probe, which does nothing."""


class LocalStore:
    """Checkpoint files below `path`.

    Args:
        path: the directory; symlinks in its path are resolved once, in the constructor.
        shared: whether permissions follow the umask; otherwise files are 0600 and directories 0700.
        allow_foreign_owner: whether to accept a directory of another user (root is always accepted).
        probe: called with (operation, path) before each operation that changes the disk: `mkdir create write fsync
            link rename unlink rmdir`. Tests use it to kill processes, raise errors, and record operations.
        pause: seconds before the first retry after a transient error (EIO, ESTALE); doubles for each retry.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        shared: bool = False,
        allow_foreign_owner: bool = False,
        probe: Callable[[str, str], None] = _ignore,
        pause: float = 0.1,
    ) -> None:
        self.root = Path(path).resolve()
        self.retries = 0
        self._file_mode, self._directory_mode = (0o666, 0o777) if shared else (0o600, 0o700)
        self._allow_foreign_owner = allow_foreign_owner
        self._probe = probe
        self._pause = pause
        self._prepared = False

    def prepare(self) -> None:
        """Creates the directory and its marker; called by the first write, or earlier as a check before a run.

        Raises:
            CheckpointError: the directory cannot be created or written, belongs to another user, or has other files.
        """
        if self._prepared:
            return
        try:
            if not self.root.is_dir():
                self._probe("mkdir", "")
                self.root.mkdir(mode=self._directory_mode, parents=True, exist_ok=True)
            with self._directory(()) as root:
                names = _names(root)
                if MARKER not in names:
                    # Another rank may have written marker and files since the listing: only then are files expected.
                    if names and MARKER not in _names(root):
                        raise CheckpointError(
                            f"{self.root} holds other files ({', '.join(sorted(names)[:3])}, ...): "
                            "use an empty directory or a directory of checkpoints"
                        )
                    self._mark(root)
                if not os.access(self.root, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, "not writable")
        except (PermissionError, NotADirectoryError, FileExistsError) as cause:
            raise CheckpointError(
                f"checkpoints cannot be written to {self.root}: {cause.strerror}; choose a writable directory"
            ) from cause
        self._prepared = True

    def _mark(self, root: int) -> None:
        self._probe("create", MARKER)
        try:
            file = os.open(MARKER, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self._file_mode, dir_fd=root)
        except FileExistsError:  # another rank was first
            return
        try:
            os.write(file, b"forge-ckpt tidies this directory: it removes what it wrote here and no longer needs.\n")
            os.fsync(file)
        finally:
            os.close(file)
        self._probe("fsync", "")
        os.fsync(root)

    def write(self, path: str, chunks: Iterable[bytes | memoryview]) -> None:
        self.prepare()
        parts = _parts(path)
        repeatable = iter(chunks) is not chunks

        def once(attempt: int) -> None:
            with self._directory(parts[:-1], create=True) as directory:
                if attempt:  # after a failed fsync, the page cache counts as clean, so only a new file is safe
                    self._unlink(parts[-1], directory, path)
                self._probe("create", path)
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                file = os.open(parts[-1], flags, self._file_mode, dir_fd=directory)
                try:
                    for chunk in chunks:
                        view = memoryview(chunk).cast("B")
                        while view:
                            self._probe("write", path)
                            view = view[os.write(file, view[:_WRITE_BYTES]) :]
                    self._probe("fsync", path)
                    os.fsync(file)
                finally:
                    os.close(file)
                self._probe("fsync", "/".join(parts[:-1]))
                os.fsync(directory)

        self._repeat(once, attempts=_ATTEMPTS if repeatable else 1)

    def link(self, source: str, target: str) -> bool:
        """See `LinkingStore`. Also returns False if `source` is not a regular file of this user."""
        self.prepare()
        old, new = _parts(source), _parts(target)

        def once(attempt: int) -> bool:
            with self._directory(old[:-1]) as before, self._directory(new[:-1], create=True) as after:
                status = os.stat(old[-1], dir_fd=before, follow_symlinks=False)
                if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                    return False
                if attempt:
                    self._unlink(new[-1], after, target)
                self._probe("link", f"{source} -> {target}")
                os.link(old[-1], new[-1], src_dir_fd=before, dst_dir_fd=after, follow_symlinks=False)
                self._probe("fsync", "/".join(new[:-1]))
                os.fsync(after)
                return True

        try:
            return self._repeat(once)
        except OSError as cause:
            if cause.errno in _NO_LINK:
                return False
            raise

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        count = self.size(path) - offset if length is None else length
        buffer = bytearray(max(count, 0))
        self.read_into(path, offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        parts = _parts(path)

        def once(_: int) -> None:
            with self._file(parts, path) as file:
                done = 0
                while done < len(buffer):
                    count = os.preadv(file, [buffer[done:]], offset + done)
                    if count == 0:
                        raise CheckpointError(f"{path} ends at byte {offset + done}, before byte {offset + len(buffer)}")
                    done += count

        self._repeat(once)

    def size(self, path: str) -> int:
        parts = _parts(path)

        def once(_: int) -> int:
            with self._file(parts, path) as file:
                return os.fstat(file).st_size

        return self._repeat(once)

    def free(self) -> int | None:
        place = self.root
        while not place.exists():
            place = place.parent
        status = os.statvfs(place)
        return status.f_bavail * status.f_frsize

    def rename(self, source: str, target: str) -> None:
        self.prepare()
        old, new = _parts(source), _parts(target)

        def once(attempt: int) -> None:
            with self._directory(old[:-1]) as before, self._directory(new[:-1]) as after:
                replaced = _mode(new[-1], after)
                moved = attempt > 0 and replaced is not None and _mode(old[-1], before) is None
                if not moved:  # an earlier attempt may have succeeded despite its error
                    if replaced is not None and not stat.S_ISREG(replaced):
                        raise FileExistsError(errno.EEXIST, "not replaced", target)
                    self._probe("rename", f"{source} -> {target}")
                    os.rename(old[-1], new[-1], src_dir_fd=before, dst_dir_fd=after)
                for parts, directory in {old[:-1]: before, new[:-1]: after}.items():
                    self._probe("fsync", "/".join(parts))
                    os.fsync(directory)

        self._repeat(once)

    def list(self, path: str = "") -> Sequence[str]:
        def once(_: int) -> Sequence[str]:
            try:
                with self._directory(_parts(path) if path else ()) as directory:
                    return sorted(_names(directory))
            except FileNotFoundError:
                return []

        return self._repeat(once)

    def remove(self, path: str) -> None:
        parts = _parts(path)

        def once(_: int) -> None:
            try:
                with self._directory(()) as root:
                    if _mode(MARKER, root) is None:
                        raise CheckpointError(f"nothing is removed from {self.root}: the file {MARKER} is missing")
                with self._directory(parts[:-1]) as parent:
                    self._remove(parts[-1], parent, path)
                    self._probe("fsync", "/".join(parts[:-1]))
                    os.fsync(parent)
            except FileNotFoundError:
                return

        self._repeat(once)

    def _remove(self, name: str, parent: int, path: str) -> None:
        mode = _mode(name, parent)
        if mode is None:
            return
        if not stat.S_ISDIR(mode):
            self._unlink(name, parent, path)
            return
        directory = os.open(name, _DIRECTORY, dir_fd=parent)
        try:
            for child in _names(directory):
                self._remove(child, directory, f"{path}/{child}")
        finally:
            os.close(directory)
        self._probe("rmdir", path)
        os.rmdir(name, dir_fd=parent)

    def _unlink(self, name: str, parent: int, path: str) -> None:
        self._probe("unlink", path)
        try:
            os.unlink(name, dir_fd=parent)
        except FileNotFoundError:  # another process removed it
            return

    def _repeat(self, action: Callable[[int], T], attempts: int = _ATTEMPTS) -> T:
        """Runs `action(attempt)` until it succeeds, raises an error that is not transient, or the attempts are used up."""
        for attempt in range(attempts):
            try:
                return action(attempt)
            except OSError as cause:
                if cause.errno not in _TRANSIENT or attempt == attempts - 1:
                    raise
                self.retries += 1
                time.sleep(self._pause * 2**attempt)
        raise AssertionError("the last attempt returns or raises")

    @contextmanager
    def _directory(self, parts: tuple[str, ...], create: bool = False) -> Iterator[int]:
        """Yields the descriptor of a directory below the root, opened without following symlinks."""
        with ExitStack() as stack:
            current = os.open(self.root, _DIRECTORY)
            stack.callback(os.close, current)
            owner = os.fstat(current).st_uid
            if owner not in (os.geteuid(), 0) and not self._allow_foreign_owner:
                raise CheckpointError(
                    f"{self.root} belongs to user {owner}, who could change the checkpoints; "
                    "set checkpoint.store.allow_foreign_owner = true to accept that"
                )
            for depth, part in enumerate(parts):
                try:
                    following = os.open(part, _DIRECTORY, dir_fd=current)
                except FileNotFoundError:
                    if not create:
                        raise
                    self._probe("mkdir", "/".join(parts[: depth + 1]))
                    with suppress(FileExistsError):  # another rank was first
                        os.mkdir(part, self._directory_mode, dir_fd=current)
                    following = os.open(part, _DIRECTORY, dir_fd=current)
                except OSError as cause:
                    raise _not_followed(cause, "/".join(parts[: depth + 1])) from cause
                stack.callback(os.close, following)
                current = following
            yield current

    @contextmanager
    def _file(self, parts: tuple[str, ...], path: str) -> Iterator[int]:
        with self._directory(parts[:-1]) as directory:
            try:
                # O_NONBLOCK: opening a FIFO must not wait for a writer.
                file = os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
            except OSError as cause:
                raise _not_followed(cause, path) from cause
            try:
                if not stat.S_ISREG(os.fstat(file).st_mode):
                    raise CheckpointError(f"{path} is not a regular file")
                yield file
            finally:
                os.close(file)


def _parts(path: str) -> tuple[str, ...]:
    parts = tuple(path.split("/"))
    if not all(is_safe(part) for part in parts):
        raise CheckpointError(f"{path!r} is not a valid path in a checkpoint store")
    return parts


def _names(directory: int) -> list[str]:
    return os.listdir(directory)


def _mode(name: str, directory: int) -> int | None:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return None


def _not_followed(cause: OSError, path: str) -> Exception:
    if cause.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
        return CheckpointError(f"{path} is a symlink or a special file; checkpoints hold only files and directories")
    return cause
