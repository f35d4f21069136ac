"""What a field of a record holds: text, or a list of token ids; and what is wrong with it where it holds neither."""

from codecs import BOM_UTF16_BE, BOM_UTF16_LE, BOM_UTF32_BE, BOM_UTF32_LE
from typing import Any

import numpy as np

_LARGEST = np.iinfo(np.int64).max
_WIDE = ((BOM_UTF32_LE, "UTF-32"), (BOM_UTF32_BE, "UTF-32"), (BOM_UTF16_LE, "UTF-16"), (BOM_UTF16_BE, "UTF-16"))
"""The mark of UTF-32, little-endian, begins with that of UTF-16: longer ones come first."""


def text_of(value: Any) -> tuple[str | None, str]:
    """(text, "") or (None, what is wrong).

    A lone surrogate, which JSON can spell, is half a character: nothing can write it as UTF-8.
    """
    if isinstance(value, bytes):  # a column of text whose bytes are none, or a column of bytes
        try:
            value.decode("utf-8")
        except UnicodeDecodeError as error:
            return None, f"is not UTF-8: {error.reason} at byte {error.start}"
    if not isinstance(value, str):
        return None, f"is {_kind(value)}, not text"
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            return None, f"holds the lone surrogate U+{ord(value[error.start]):04X} at character {error.start}"
    return value, ""


def ids_of(value: Any) -> tuple[np.ndarray | None, str]:
    """((n,) int64 token ids, "") or (None, what is wrong). `value` is a list, or an array of integers of a column."""
    if isinstance(value, list):
        if set(map(type, value)) - {int}:
            index = next(index for index, item in enumerate(value) if type(item) is not int)
            what = "a null" if value[index] is None else _kind(value[index])
            return None, f"holds {what} at index {index}, not a token id"
        try:
            ids = np.array(value, dtype=np.int64)
        except OverflowError:
            return None, _outside(next(item for item in enumerate(value) if abs(item[1]) > _LARGEST))
    elif isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "ui":
        if value.dtype.kind == "u" and len(value) and int(value.max()) > _LARGEST:
            index = int(value.argmax())
            return None, _outside((index, int(value[index])))
        ids = value.astype(np.int64)
    else:
        return None, f"is {_kind(value)}, not a list of token ids"
    if len(ids) and int(ids.min()) < 0:
        index = int(ids.argmin())
        return None, _outside((index, int(ids[index])))
    return ids, ""


def wide_encoding(head: bytes) -> str | None:
    """UTF-16 or UTF-32, where a file begins with the byte order mark of one."""
    return next((name for mark, name in _WIDE if head.startswith(mark)), None)


def _outside(item: tuple[int, int]) -> str:
    index, number = item
    if number < 0:
        return f"holds the negative id {number} at index {index}"
    return f"holds {number} at index {index}, larger than any token id"


def _kind(value: Any) -> str:
    return "missing or null" if value is None else f"a {type(value).__name__}"
