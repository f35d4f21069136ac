"""Bytes that are on the disk, not only on their way there."""

import os
from pathlib import Path
from typing import IO


def synced(file: IO[bytes]) -> None:
    """Flushes an open file to the disk."""
    file.flush()
    os.fsync(file.fileno())


def written(path: Path, content: bytes) -> None:
    """Writes a file and flushes it to the disk."""
    with path.open("wb") as file:
        file.write(content)
        synced(file)


def sync_directory(path: Path) -> None:
    """Flushes the names in a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
