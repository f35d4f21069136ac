"""Writes one stream of token ids: `.npy` with its header, or raw integers. Where documents end is not written."""

from pathlib import Path
from types import TracebackType
from typing import IO, Self

import numpy as np

from forge_core.durable_files import publish, sync
from forge_core.errors import DataError
from forge_data.storage.partial import Partial


class ArrayWriter:
    """Use as a context manager; `commit` makes the file appear, leaving without it removes what was written.

    The file can tell documents apart only by their last token, so all documents must end in the same one, which occurs
    nowhere else; unless the caller says that borders may get lost.
    """

    def __init__(self, path: Path, dtype: str, *, header: bool, lose_documents: bool) -> None:
        """Begins `path`, which must not exist.

        Raises:
            DataError: it exists, or the directory cannot be written.
        """
        self.path = path
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.header = header
        self.lose_documents = lose_documents
        self.eos: int | None = None
        self._tokens = 0
        if path.exists():
            raise DataError(f"{path} exists; choose another place or remove it")
        try:
            self._owned = Partial(path, directory=False)
            self._partial = self._owned.path
            self._file = self._partial.open("wb")
        except OSError as error:
            raise DataError(f"{path.parent} cannot be written: {error.strerror}; choose another directory") from error
        self._head(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()
        self._owned.close()

    def add(self, ids: np.ndarray, ends: np.ndarray) -> None:
        """Appends whole documents; see `StoreWriter.add`.

        Raises:
            DataError: an id does not fit the dtype, borders would get lost, or the disk is full.
        """
        if not len(ids):
            return
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high > np.iinfo(self.dtype).max:
            raise DataError(f"token id {low if low < 0 else high} does not fit {self.dtype.name}; choose a larger dtype")
        if not self.lose_documents:
            self._refuse_lost(ids, ends)
        try:
            self._file.write(ids.astype(self.dtype, copy=False).tobytes())
        except OSError as error:
            raise DataError(f"{self._partial} cannot be written: {error.strerror}") from error
        self._tokens += len(ids)

    def commit(self) -> int | None:
        """Finishes the file and gives it its name; returns the token that ends documents, if one does.

        Raises:
            DataError: nothing was added, or the disk is full.
        """
        if not self._tokens:
            raise DataError(f"{self.path} gets no documents; nothing to write")
        try:
            self._file.seek(0)
            self._head(self._tokens)
            sync(self._file)
            self._file.close()
            publish(self._partial, self.path)
        except OSError as error:
            raise DataError(f"{self.path} cannot be written: {error.strerror}") from error
        return self.eos

    def _head(self, tokens: int) -> None:
        """The header; numpy leaves room in it for any number, so its length stays the same."""
        if self.header:
            described = {"descr": self.dtype.str, "fortran_order": False, "shape": (tokens,)}
            file: IO[bytes] = self._file
            np.lib.format.write_array_header_1_0(file, described)

    def _refuse_lost(self, ids: np.ndarray, ends: np.ndarray) -> None:
        last = ids[np.asarray(ends, dtype=np.int64) - 1]
        self.eos = int(last[0]) if self.eos is None else self.eos
        if (last != self.eos).any() or np.count_nonzero(ids == self.eos) != len(ends):
            raise DataError(
                f"documents do not all end in one token that occurs nowhere else (such as {self.eos}), so {self.path.name} "
                "cannot say where they end; write a store or Megatron's format, or give --lose-documents"
            )
