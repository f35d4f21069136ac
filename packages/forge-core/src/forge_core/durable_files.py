"""Writes files atomically and durably: under a temporary name, flushed to disk, then renamed. Does not import torch."""

import os
from pathlib import Path
from typing import IO


def sync(file: IO[bytes]) -> None:
    """Flushes an open file to disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Flushes a closed file, or the names in a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes) -> None:
    """Writes a file and flushes it to disk."""
    with path.open("wb") as file:
        file.write(content)
        sync(file)


def publish(partial: Path, target: Path) -> None:
    """Renames a flushed file or directory durably; replaces a file or an empty directory."""
    partial.replace(target)
    sync_path(target.parent)


def replace_file(path: Path, content: bytes) -> None:
    """Replaces the content of a file atomically: readers see the old or the new content, even after a crash."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write_file(temporary, content)
        publish(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
