"""Files that appear whole and stay: written under another name, flushed to the disk, then renamed. No torch."""

import os
from pathlib import Path
from typing import IO


def sync(file: IO[bytes]) -> None:
    """Flushes an open file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Flushes a closed file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes) -> None:
    """Writes a file and flushes it to the disk."""
    with path.open("wb") as file:
        file.write(content)
        sync(file)


def publish(partial: Path, target: Path) -> None:
    """Gives a file or directory that is on the disk its name, also after a crash; replaces a file or an empty directory."""
    partial.replace(target)
    sync_path(target.parent)


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all: readers see the old content or the new one, also after a crash."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_file(temporary, content)
        publish(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
