"""Text files as documents: which files, in which order, in which split."""

import glob
from collections.abc import Iterator, Sequence
from hashlib import blake2b, sha256
from pathlib import Path

from forge_core.errors import DataError

SUFFIXES = (".txt", ".md")
"""What a directory is searched for."""


class TextFiles:
    """UTF-8 files as documents in the order of their names, one document a file; empty files are left out.

    Attributes:
        fingerprint: of names, sizes and modification times, so that nothing is read to see whether anything changed.
        files: (name, path) of each.
    """

    def __init__(self, files: Sequence[tuple[str, Path]], what: str) -> None:
        """Documents of `files`, in this order; `what` names them in messages.

        Raises:
            DataError: no file, or only empty ones.
        """
        self.files = tuple(files)
        self.what = what
        digest = sha256()
        size = 0
        for name, path in self.files:
            try:
                found = path.stat()
            except OSError as error:
                raise DataError(f"{path} cannot be read: {error.strerror}") from error
            size += found.st_size
            digest.update(f"{name}\0{found.st_size}\0{found.st_mtime_ns}\n".encode())
        if not size:
            raise DataError(f"{what} holds no text ({len(self.files)} files); is the path right?")
        self.fingerprint = digest.hexdigest()
        self.bytes = size

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """(name, text) of each file that is not empty.

        Raises:
            DataError: a file is not UTF-8; names it and the offset.
        """
        for name, path in self.files:
            try:
                text = path.read_bytes().decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path} at byte {error.start} is not UTF-8 text: {error.reason}; convert or remove it"
                ) from error
            except OSError as error:
                raise DataError(f"{path} cannot be read: {error.strerror}") from error
            if text:
                yield name, text


def in_split(name: str, split: str, held_out: float) -> bool:
    """Whether a document belongs to a split, by a hash of its name: adding others moves none."""
    if split == "all":
        return True
    place = int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") / 2**64
    return (place < held_out) == (split == "held_out")


def text_files(path: str, split: str = "all", held_out: float = 0.05) -> TextFiles:
    """The files that a path, directory or pattern names, sorted by their path relative to its fixed part.

    Raises:
        DataError: there is none, or none in this split.
    """
    given = Path(path).expanduser()
    if given.is_file():
        base, files = given.parent, [given]
    elif given.is_dir():
        base, files = given, [file for file in given.rglob("*") if file.suffix in SUFFIXES and file.is_file()]
    elif glob.has_magic(path):
        base = _fixed_part(given)
        files = [Path(file) for file in glob.glob(str(given), recursive=True) if Path(file).is_file()]  # noqa: PTH207
    else:
        raise DataError(f"{path} does not exist; give a text file, a directory or a pattern such as 'corpus/**/*.txt'")
    if not files:
        raise DataError(f"{path} names no text file; a directory is searched for {' and '.join(SUFFIXES)}")
    named = sorted((file.relative_to(base).as_posix(), file) for file in files)
    chosen = [(name, file) for name, file in named if in_split(name, split, held_out)]
    if not chosen:
        raise DataError(f"{path}: none of {len(named)} files is in split {split!r}; give more files or another held_out")
    return TextFiles(chosen, f"{path} ({split})")


def _fixed_part(pattern: Path) -> Path:
    parts = []
    for part in pattern.parts[:-1]:
        if glob.has_magic(part):
            break
        parts.append(part)
    return Path(*parts)
