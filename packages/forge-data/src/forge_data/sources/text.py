"""Text files as documents, one document per file; also the Python standard library as a corpus of real text."""

import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from forge_core.errors import DataError
from forge_data.sources.records import CorpusPart, Document, Records, Skips, Wanted, grouped, in_split, wide_encoding
from forge_data.storage.files import File, find, read_bytes

SUFFIXES = (".txt", ".md")
"""Suffixes of the files that are read from a directory."""
_MARK = "\ufeff"
"""The byte order mark that some editors write at the start of a UTF-8 file; it is not text."""
STDLIB_LEFT_OUT = frozenset(
    {
        "site-packages",  # not the standard library
        "dist-packages",
        "__pycache__",
        "test",  # tests, and data files in other encodings
        "tests",
        "idle_test",
        "lib2to3",  # grammar tests in unusual encodings; removed in later versions
        "encodings",  # code tables
    }
)


def text_files(path: str, split: str = "all", held_out: float = 0.05, skip: int = 0) -> Records:
    """Opens the files that a path, directory, pattern or URL names, sorted by path relative to its fixed part.

    Raises:
        DataError: no file is found, no file is in this split, or all are empty.
    """
    files = find(path, SUFFIXES, "text")
    chosen = [file for file in files if in_split(file.name, split, held_out)]
    if not chosen:
        raise DataError(f"{path}: none of {len(files)} files is in split {split!r}; add files or change held_out")
    return documents(chosen, f"{path} ({split})", skip)


def documents(files: Sequence[File], what: str, skip: int = 0) -> Records:
    """Opens each of `files` as one document; `what` is their name in messages.

    Raises:
        DataError: all files are empty.
    """
    if not any(file.size for file in files):
        raise DataError(f"{what} has no text: all {len(files)} files are empty; check the path")
    return Records(files, Wanted("text"), what, grouped, skip)


def read(part: CorpusPart, _: Wanted, skips: Skips) -> Iterator[Document]:
    """See `records.RecordReader`. The name of a document is its file."""
    for file in part.files:
        content = read_bytes(file, 0, file.size)
        if encoding := wide_encoding(content[:4]):
            skips.broken(f"{file.where} is {encoding} text according to its byte order mark; convert it to UTF-8")
            continue
        try:
            text = content.decode("utf-8").removeprefix(_MARK)
        except UnicodeDecodeError as error:
            skips.broken(f"{file.where} at byte {error.start} is not UTF-8 text: {error.reason}; convert or remove it")
            continue
        yield file.name, text


def stdlib_files(split: str = "all", held_out: float = 0.05) -> Records:
    """Opens the modules of the standard library in the order of their relative paths.

    Raises:
        DataError: this Python was installed without sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [_library_file(name, path) for name, path in _library_modules(root) if in_split(name, split, held_out)]
    if not files:
        raise DataError(f"the standard library in {root} has no .py files; install Python with its sources, or use source 'text'")
    return documents(files, f"standard library ({split})")


def _library_file(name: str, path: Path) -> File:
    status = path.stat()
    return File(name, str(path), status.st_size, str(status.st_mtime_ns))


def _library_modules(root: Path) -> Iterator[tuple[str, Path]]:
    paths = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in STDLIB_LEFT_OUT]  # os.walk skips the removed ones
        # _sysconfigdata holds the paths of the machine that built Python.
        modules = (name for name in files if name.endswith(".py") and not name.startswith("_sysconfigdata"))
        # Distributions link to files of the machine, such as sitecustomize.py, which need not exist.
        paths += [path for name in modules if (path := Path(folder, name)).is_file()]
    yield from sorted((path.relative_to(root).as_posix(), path) for path in paths)
