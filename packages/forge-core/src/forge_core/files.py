"""Writes files atomically and durably (under a temporary name, flushed to disk, then renamed), and splits text into lines."""

import os
import re
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


_END = re.compile(r"\r?\n")


def lines_of(text: str) -> list[str]:
    """Returns the lines of a text without their ends; a line ends with a line feed, or with carriage return and line feed.

    `str.splitlines` also splits at ten other characters that texts contain, such as a form feed, U+0085, U+2028 and U+001C. A
    line end at the end of the text does not begin another line.
    """
    lines = _END.split(text)
    return lines if lines[-1] else lines[:-1]
