"""Reads one file of token ids in place: `.npy`, or raw integers of a stated dtype, which is never guessed."""

from pathlib import Path

import numpy as np
import xxhash

from forge_core.errors import DataError
from forge_data.components.sources import Tokens

SCANNED = 1 << 26
"""Files up to so many tokens are read once when they are opened, to know the largest id."""
_MAGIC = b"\x93NUMPY"


class TokensFile:
    """A file of token ids as a `Source`; documents end after `eos`, or there is one document."""

    text_bytes: int | None = None
    tokenizer: str | None = None

    def __init__(self, path: Path, data: np.ndarray, eos: int | None, vocab_size: int | None) -> None:
        self.name = str(path)
        self.data = data
        self.eos = eos
        self.tokens = len(data)
        self.vocab_size = vocab_size
        self.max_id = None
        if self.tokens <= SCANNED:
            if int(data.min()) < 0:
                raise DataError(f"{path} at token {int(data.argmin())}: negative token id {int(data.min())}")
            self.max_id = int(data.max())
        self.fingerprint = _fingerprint(data, eos)

    def read(self, start: int, stop: int) -> np.ndarray:
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"tokens [{start}, {stop}) of {self.tokens} in {self.name}")
        return self.data[start:stop]

    def ends(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Document ends e with start < e <= stop; found by reading the tokens in between."""
        stop = self.tokens if stop is None else min(stop, self.tokens)
        found = np.empty(0, dtype=np.int64)
        if self.eos is not None:
            found = np.flatnonzero(self.data[start:stop] == self.eos) + start + 1
        if stop == self.tokens > start and (not len(found) or found[-1] != stop):
            found = np.append(found, stop)
        return found.astype(np.uint64)

    def borders(self, starts: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Document ends inside many windows; see `Source.borders`."""
        found = [(self.ends(start, start + length) - np.uint64(start)).astype(np.int64) for start in starts.tolist()]
        rows = np.repeat(np.arange(len(found)), [len(columns) for columns in found])
        return rows, np.concatenate([*found, np.empty(0, dtype=np.int64)])


def open_tokens(component: Tokens) -> TokensFile:
    """Opens what the component names.

    Raises:
        DataError: missing or empty file, no dtype, a dtype that contradicts the header, or a cut-off last token.
    """
    path = Path(component.path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    data = _npy(path, component.dtype) if magic == _MAGIC else _raw(path, size, component.dtype)
    if not len(data):
        raise DataError(f"{path} holds no token")
    return TokensFile(path, data, component.eos, component.vocab_size)


def _npy(path: Path, stated: str | None) -> np.ndarray:
    try:
        data = np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (ValueError, OSError) as error:
        raise DataError(f"{path} is a damaged .npy file: {error}") from error
    if data.ndim != 1 or data.dtype.kind not in "ui":
        raise DataError(f"{path}: token ids are one row of integers, found {data.dtype} of shape {data.shape}")
    if stated is not None and data.dtype != np.dtype(stated):
        raise DataError(f"{path}: its header says {data.dtype}, the recipe dtype = {stated!r}; remove `dtype`")
    return data


def _raw(path: Path, size: int, stated: str | None) -> np.ndarray:
    if stated is None:
        raise DataError(f"{path} has no header, so its dtype is unknown; state it, such as dtype = 'uint16'")
    dtype = np.dtype(stated).newbyteorder("<")
    if not size:
        raise DataError(f"{path} is empty")
    if size % dtype.itemsize:
        cut = size - size % dtype.itemsize
        raise DataError(
            f"{path} has {size} bytes, no multiple of {dtype.itemsize} ({stated}): cut off at byte {cut}, or another dtype"
        )
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


def _fingerprint(data: np.ndarray, eos: int | None) -> str:
    """Of length, dtype and 64 evenly spaced blocks of 4,096 tokens: O(1) in the size of the file."""
    digest = xxhash.xxh3_128(f"{len(data)} {data.dtype.str} {eos}".encode())
    for start in np.linspace(0, max(0, len(data) - 4096), 64).astype(np.int64).tolist():
        digest.update(data[start : start + 4096].tobytes())
    return digest.hexdigest()
