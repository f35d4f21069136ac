"""Reads FASTA: a line with `>` begins a record, the lines after it are its letters."""

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from forge_core import DataError


class FastaTexts:
    """Implements `forge_core.protocols.Texts`."""

    def __init__(self, path: Path) -> None:
        self._files = sorted({*path.glob("*.fa"), *path.glob("*.fasta")}) if path.is_dir() else [path]
        if missing := [file for file in self._files if not file.is_file()] or not self._files:
            raise DataError(f"source 'fasta': {path} is no FASTA file and no folder with one ({missing}); set its path")
        self._fingerprint: str | None = None

    @property
    def fingerprint(self) -> str:
        """Hash of names and letters."""
        if self._fingerprint is None:
            self._fingerprint = self._hash()
        return self._fingerprint

    def _hash(self) -> str:
        found = sha256()
        for name, text in self:
            found.update(f"{name}\0{text}\0".encode())
        return found.hexdigest()

    def __iter__(self) -> Iterator[tuple[str, str]]:
        for file in self._files:
            name, letters = "", list[str]()
            for number, line in enumerate(file.read_text().splitlines(), 1):
                if line.startswith(">"):
                    if name:
                        yield name, "".join(letters)
                    name, letters = f"{file.name}: {line[1:].strip()}", []
                elif name:
                    letters.append(line.strip())
                elif line.strip():
                    raise DataError(f"{file}:{number}: letters before the first header; a record begins with a line '>name'")
            if name:
                yield name, "".join(letters)
