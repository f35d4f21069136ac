"""Writes Megatron's indexed datasets: one sequence a document, as its own preprocessing does for language models."""

from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from forge_core.durable_files import publish, sync
from forge_core.errors import DataError
from forge_data.sources.tokens.megatron import DTYPES, HEAD, MAGIC
from forge_data.storage.partial import Partial

_CODES = {np.dtype(name): code for code, name in DTYPES.items() if name[1] in "ui"}
_HELD = {"uint32": "int32", "uint64": "int64"}
_LARGEST_SEQUENCE = 2**31 - 1


class MegatronWriter:
    """Use as a context manager; `commit` makes both files appear, the index last, leaving without it removes them."""

    def __init__(self, prefix: Path, dtype: str) -> None:
        """Begins `prefix.bin` and `prefix.idx`, which must not exist.

        Args:
            prefix: path without suffix.
            dtype: of the ids; uint32 and uint64, which the format lacks, are written as int32 and int64.

        Raises:
            DataError: they exist, or the directory cannot be written, or the format has no such dtype.
        """
        self.prefix = prefix
        self.dtype = np.dtype(_HELD.get(dtype, dtype)).newbyteorder("<")
        if self.dtype not in _CODES:
            raise DataError(f"Megatron's format has no dtype {dtype!r}; choose one of {', '.join(d.name for d in _CODES)}")
        self._targets = [prefix.with_name(f"{prefix.name}{suffix}") for suffix in (".bin", ".idx")]
        if found := next((target for target in self._targets if target.exists()), None):
            raise DataError(f"{found} exists; choose another place or remove it")
        self._lengths: list[np.ndarray] = []
        try:
            self._owned = [Partial(target, directory=False) for target in self._targets]
            self._partials = [owned.path for owned in self._owned]
            self._file = self._partials[0].open("wb")
        except OSError as error:
            raise DataError(f"{prefix.parent} cannot be written: {error.strerror}; choose another directory") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        for owned in self._owned:
            owned.close()

    def add(self, ids: np.ndarray, ends: np.ndarray) -> None:
        """Appends whole documents; see `StoreWriter.add`.

        Raises:
            DataError: an id does not fit the dtype, a document is longer than 2^31 - 1 tokens, or the disk is full.
        """
        if not len(ids):
            return
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high > np.iinfo(self.dtype).max:
            raise DataError(f"token id {low if low < 0 else high} does not fit {self.dtype.name}; choose a larger dtype")
        lengths = np.diff(np.asarray(ends, dtype=np.int64), prepend=0)
        if int(lengths.max()) > _LARGEST_SEQUENCE:
            raise DataError(f"a document of {int(lengths.max())} tokens is longer than the format allows ({_LARGEST_SEQUENCE})")
        self._lengths.append(lengths.astype("<i4"))
        try:
            self._file.write(ids.astype(self.dtype, copy=False).tobytes())
        except OSError as error:
            raise DataError(f"{self._partials[0]} cannot be written: {error.strerror}") from error

    def commit(self) -> int:
        """Writes the index and gives both files their names; returns the number of documents.

        Raises:
            DataError: nothing was added, or the disk is full.
        """
        if not self._lengths:
            raise DataError(f"{self.prefix} gets no documents; nothing to write")
        lengths = np.concatenate(self._lengths)
        pointers = np.zeros(len(lengths), dtype="<i8")
        np.cumsum(lengths[:-1].astype(np.int64) * self.dtype.itemsize, out=pointers[1:])
        head = HEAD.pack(MAGIC, 1, _CODES[self.dtype], len(lengths), len(lengths) + 1)
        try:
            sync(self._file)
            self._file.close()
            with self._partials[1].open("wb") as index:
                index.write(head)
                for array in (lengths, pointers, np.arange(len(lengths) + 1, dtype="<i8")):
                    index.write(array.data)
                sync(index)
            for partial, target in zip(self._partials, self._targets, strict=True):
                publish(partial, target)
        except OSError as error:
            raise DataError(f"{self.prefix} cannot be written: {error.strerror}") from error
        return len(lengths)
