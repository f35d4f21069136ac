"""Tensors as bytes: one flat file per rank, its pieces back to back, each with an xxh3_128 checksum.

A rank file has no header. The manifest says which pieces it holds, in order; a piece's length follows from its box and
dtype and its place from the lengths before it, so no two statements about a file can contradict each other. Elements are
little-endian and row-major.
"""

from collections.abc import Iterator, Sequence

import torch
import xxhash

from forge_core.errors import CheckpointError
from forge_core.protocols.ckpt import Piece, Store

CHUNK_BYTES = 4 << 20
"""Bytes that are copied, hashed and written or read at a time."""

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool"),
        *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
}
"""Every dtype that a checkpoint can hold, by its torch name."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(tensor: torch.Tensor, name: str) -> str:
    """The name of a tensor's dtype.

    Raises:
        CheckpointError: elements of this dtype are not whole bytes, or the tensor has no plain memory here.
    """
    if tensor.dtype not in _NAMES:
        raise CheckpointError(f"{name}: {tensor.dtype} cannot be stored; known: {', '.join(DTYPES)}")
    if tensor.is_meta or tensor.layout != torch.strided or hasattr(tensor, "placements"):
        raise CheckpointError(f"{name}: a piece holds a plain dense tensor, not one that is meta, sparse or distributed")
    return _NAMES[tensor.dtype]


def byte_chunks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, a chunk at a time; a contiguous tensor on the CPU is not copied."""
    flat = _flat_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())
    for start in range(0, flat.numel(), CHUNK_BYTES):
        yield flat[start : start + CHUNK_BYTES].cpu().numpy().data


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as uint8, shared; `reshape(-1)` may keep an odd stride where a size is 1."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class RankFile:
    """The bytes of one rank's pieces; iterating writes `checksums`, iterating again starts anew."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces
        self.checksums: list[bytes] = []

    def __iter__(self) -> Iterator[memoryview]:
        self.checksums = []
        for piece in self.pieces:
            digest = xxhash.xxh3_128()
            for chunk in byte_chunks(piece.local):
                digest.update(chunk)
                yield chunk
            self.checksums.append(digest.digest())


def checksum(store: Store, path: str, start: int, length: int, buffer: memoryview) -> bytes:
    """xxh3_128 of a range of a file, read through `buffer`."""
    digest = xxhash.xxh3_128()
    for offset in range(0, length, len(buffer)):
        part = buffer[: min(len(buffer), length - offset)]
        store.read_into(path, start + offset, part)
        digest.update(part)
    return digest.digest()


def copy_box(
    store: Store, path: str, start: int, source: tuple[Sequence[int], Sequence[int]], target: torch.Tensor, offset: Sequence[int]
) -> None:
    """Copies into a live tensor what it shares with a stored box.

    Args:
        path, start: file and byte where the stored box begins.
        source: offset and extent of the stored box in the global tensor.
        target: the live tensor, dtype as stored; its box begins at `offset`.
    """
    stored_offset, stored_extent = source
    live = target.detach()
    if live.dim() == 0:
        live, offset, stored_offset, stored_extent = live.reshape(1), [0], [0], [1]
    low = [max(a, b) for a, b in zip(stored_offset, offset, strict=True)]
    high = [min(a + m, b + n) for a, m, b, n in zip(stored_offset, stored_extent, offset, live.shape, strict=True)]
    into = live[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))]
    row_bytes = live.element_size()
    for size in stored_extent[1:]:
        row_bytes *= size
    first, last = low[0] - stored_offset[0], high[0] - stored_offset[0]
    whole_rows = all(b - a == size for a, b, size in zip(low[1:], high[1:], stored_extent[1:], strict=True))
    if whole_rows and into.is_contiguous() and into.device.type == "cpu":
        direct = _flat_bytes(into).numpy().data
        for done in range(0, len(direct), CHUNK_BYTES):
            store.read_into(path, start + first * row_bytes + done, direct[done : done + CHUNK_BYTES])
        return
    columns = tuple(slice(a - o, b - o) for a, b, o in zip(low[1:], high[1:], stored_offset[1:], strict=True))
    rows = max(1, CHUNK_BYTES // row_bytes)
    staging = torch.empty(min(rows, last - first) * row_bytes, dtype=torch.uint8)
    for row in range(first, last, rows):
        count = min(rows, last - row)
        part = staging[: count * row_bytes]
        store.read_into(path, start + row * row_bytes, part.numpy().data)
        box = part.view(live.dtype).view(count, *stored_extent[1:])
        into[row - first : row - first + count].copy_(box[(slice(None), *columns)])
