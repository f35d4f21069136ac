"""Reads zstandard files and notices when one is cut off, which the library's own stream does not."""

import io
from typing import IO, Any

from forge_core.errors import DataError

_ZSTD_BLOCK = 1 << 20


def decompressed(raw: IO[bytes], where: str) -> io.BufferedReader:
    """The decompressed content of an open file.

    Raises:
        DataError: zstandard is not installed.
    """
    try:
        import zstandard
    except ImportError as error:
        raise DataError(f"{where} needs zstandard; pip install 'forge-data[zstd]'") from error
    return io.BufferedReader(_Frames(raw, zstandard.ZstdDecompressor, zstandard.ZstdError), _ZSTD_BLOCK)


class _Frames(io.RawIOBase):
    """Frame after frame; raises `ValueError` for damage and for an end inside a frame."""

    def __init__(self, raw: IO[bytes], decompressor: Any, error: type[Exception]) -> None:
        self._raw, self._decompressor, self._error = raw, decompressor, error
        self._frame: Any = None
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            rest = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
            data = rest or self._raw.read(_ZSTD_BLOCK)
            if not data:
                if self._frame is not None and not self._frame.eof:
                    raise ValueError("it ends inside a zstandard frame")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = self._decompressor().decompressobj()
            try:
                self._ready = self._frame.decompress(data)
            except self._error as error:
                raise ValueError(str(error)) from error
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count
