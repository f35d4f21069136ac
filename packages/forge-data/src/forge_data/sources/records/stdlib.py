"""The installed Python standard library as a corpus of real text: code, comments and docstrings."""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from forge_core.errors import DataError
from forge_data.sources.records.parts import Records, in_split
from forge_data.sources.records.text import documents
from forge_data.storage.file import File

LEFT_OUT = frozenset(
    {
        "site-packages",  # not the standard library
        "dist-packages",
        "__pycache__",
        "test",  # tests, and data files in other encodings
        "tests",
        "idle_test",
        "lib2to3",  # grammar tests in odd encodings, and gone from later versions
        "encodings",  # code tables
    }
)


def stdlib_files(split: str = "all", held_out: float = 0.05) -> Records:
    """The library's modules in the order of their relative paths.

    Raises:
        DataError: this Python was installed without sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = [_file(name, path) for name, path in _modules(root) if in_split(name, split, held_out)]
    if not found:
        raise DataError(f"the standard library in {root} has no .py files; install Python with its sources, or use source 'text'")
    return documents(found, f"standard library ({split})")


def _file(name: str, path: Path) -> File:
    found = path.stat()
    return File(name, str(path), found.st_size, str(found.st_mtime_ns))


def _modules(root: Path) -> Iterator[tuple[str, Path]]:
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in LEFT_OUT]  # walks into none of them
        # _sysconfigdata holds the paths of the machine that built Python.
        modules = (name for name in files if name.endswith(".py") and not name.startswith("_sysconfigdata"))
        found += [Path(folder, name) for name in modules]
    yield from sorted((path.relative_to(root).as_posix(), path) for path in found)
