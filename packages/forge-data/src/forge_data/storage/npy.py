"""Reads one-dimensional `.npy` files; any damage raises a `DataError` that names the file.

numpy parses the header as a Python literal, so a damaged header can raise any exception of Python's parser.
"""

import io
import warnings
from typing import NamedTuple

import numpy as np

from forge_core.errors import DataError
from forge_data.storage.files import File, read_bytes
from forge_data.storage.shards import map_file

MAGIC = b"\x93NUMPY"
HEAD = 256
"""Bytes that contain almost every header; a longer one needs a second read."""
_VERSIONS = {(1, 0): 10, (2, 0): 12, (3, 0): 12}
"""Byte offset of the header's text, by format version."""
_LONGEST = 10_000
"""Maximum number of header characters that numpy parses."""


class NpyHeader(NamedTuple):
    """Byte offset of the values of a file, their shape and dtype."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype


def read_header(file: File, head: bytes | None = None, advice: str = "restore the file") -> NpyHeader:
    """Reads the header of a file.

    Args:
        file: a `.npy` file.
        head: its first `HEAD` bytes, if they were already read.
        advice: what to do about a damaged file, for messages.

    Raises:
        DataError: numpy cannot read the header, or its values are impossible.
    """
    head = read_bytes(file, 0, HEAD) if head is None else head
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old headers are accepted; unknown dtypes raise an error
            return _parse(file, head)
    except DataError:
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, ValueError) else f"its header is not a Python literal: {error}"
        raise DataError(f"{file.where} is a damaged .npy file: {reason}; {advice}") from error


def _parse(file: File, head: bytes) -> NpyHeader:
    version = np.lib.format.read_magic(io.BytesIO(head))
    if version not in _VERSIONS:
        raise ValueError(f"version {version[0]}.{version[1]} of the format is unknown")
    start = _VERSIONS[version]
    if len(head) < start:
        raise ValueError(f"it ends at byte {len(head)}, inside its header")
    length = int.from_bytes(head[8:start], "little")
    if length > _LONGEST:
        raise ValueError(f"its header claims {length} bytes, more than {_LONGEST}")
    if start + length > len(head):
        head = read_bytes(file, 0, start + length)
    content = io.BytesIO(head)
    np.lib.format.read_magic(content)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(content)
    if any(isinstance(size, bool) or size < 0 for size in shape):
        raise ValueError(f"its header has the impossible shape {shape}")
    return NpyHeader(start + length, shape, dtype)


def load(file: File, dtype: np.dtype, advice: str = "restore the file") -> np.ndarray:
    """Returns the (n,) read-only values of a file of `dtype`.

    Raises:
        DataError: the file has another dtype or shape, or its size does not match its header.
    """
    header = read_header(file, None, advice)
    if len(header.shape) != 1 or header.dtype != dtype:
        raise DataError(f"{file.where} must list {dtype.name} values, found {header.dtype} {header.shape}; {advice}")
    refuse_other_size(file, header, advice)
    return map_file(file, dtype, header.shape[0], header.offset)


def refuse_other_size(file: File, header: NpyHeader, advice: str = "restore the file") -> None:
    """Refuses a one-dimensional file whose size does not match its header.

    Raises:
        DataError: the file is truncated or too long.
    """
    wanted = header.offset + header.shape[0] * header.dtype.itemsize
    if file.size != wanted:
        what = "truncated" if file.size < wanted else "too long"
        raise DataError(f"{file.where} is {what}: it ends at byte {file.size}, its header says {wanted}; {advice}")
