"""Tensors as bytes: little-endian and row-major, in chunks that come from a device or go there."""

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from itertools import chain
from math import prod

import torch

from forge_ckpt.format.elements import CHUNK_BYTES, ITEMSIZE
from forge_ckpt.format.rank_file import RankFile
from forge_ckpt.transfer.turns import DoubleBuffer, to_device, to_host
from forge_core.errors import CheckpointError
from forge_core.protocols.checkpoint import Piece, Store

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEMSIZE if hasattr(torch, name)}
"""Those of `ITEMSIZE` that this torch has."""

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


def byte_chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The bytes of a tensor, a chunk at a time, where the tensor is; one that is contiguous is not copied."""
    flat = _flat_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())
    for start in range(0, flat.numel(), CHUNK_BYTES):
        yield flat[start : start + CHUNK_BYTES]


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as uint8, shared; `reshape(-1)` may keep an odd stride where a size is 1."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def file_of(pieces: Sequence[Piece]) -> RankFile:
    """The file of these pieces. While a chunk is hashed and written, the next one comes from the device."""

    def source() -> Generator[memoryview]:
        chunks = chain.from_iterable(byte_chunks(piece.local) for piece in pieces)
        return to_host(chunks, DoubleBuffer(CHUNK_BYTES))

    return RankFile([piece.local.numel() * piece.local.element_size() for piece in pieces], source)


def copy_box(
    store: Store,
    path: str,
    start: int,
    source: tuple[Sequence[int], Sequence[int]],
    target: torch.Tensor,
    offset: Sequence[int],
    turns: DoubleBuffer,
) -> None:
    """Copies into a live tensor what it shares with a stored box.

    Args:
        path, start: file and byte where the stored box begins.
        source: offset and extent of the stored box in the global tensor.
        target: the live tensor, dtype as stored; its box begins at `offset`.
        turns: of slots of `CHUNK_BYTES`; a target on a device is filled when they end.
    """
    stored_offset, stored_extent = source
    live = target.detach()
    if live.dim() == 0:
        live, offset, stored_offset, stored_extent = live.reshape(1), [0], [0], [1]
    low = [max(a, b) for a, b in zip(stored_offset, offset, strict=True)]
    high = [min(a + m, b + n) for a, m, b, n in zip(stored_offset, stored_extent, offset, live.shape, strict=True)]
    into = live[tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset, strict=True))]
    wanted = [slice(a - o, b - o) for a, b, o in zip(low, high, stored_offset, strict=True)]
    _fill(partial(store.read_into, path), start, stored_extent, wanted, into, turns)


def _fill(
    read: Callable[[int, memoryview], None],
    start: int,
    extent: Sequence[int],
    wanted: Sequence[slice],
    into: torch.Tensor,
    turns: DoubleBuffer,
) -> None:
    """Fills a tensor with the `wanted` part of a stored box that begins at byte `start`, by at most `CHUNK_BYTES` at a time."""
    row_bytes = into.element_size() * prod(extent[1:])
    start += wanted[0].start * row_bytes
    whole_rows = list(into.shape[1:]) == list(extent[1:])
    if whole_rows and into.is_contiguous():
        flat = _flat_bytes(into)
        for done in range(0, flat.numel(), CHUNK_BYTES):
            to_device(flat[done : done + CHUNK_BYTES], partial(read, start + done), turns)
        return
    if row_bytes > CHUNK_BYTES and len(extent) > 1:
        for row in range(len(into)):
            _fill(read, start + row * row_bytes, extent[1:], wanted[1:], into[row], turns)
        return
    # Whole rows are read, and what is wanted of them is chosen where the tensor is: on a device, after the copy.
    rows = min(CHUNK_BYTES // row_bytes, len(into))
    staging = torch.empty(rows * row_bytes, dtype=torch.uint8, device=into.device)
    for row in range(0, len(into), rows):
        part = into[row : row + rows]
        whole = staging[: len(part) * row_bytes]
        to_device(whole, partial(read, start + row * row_bytes), turns)
        part.copy_(whole.view(into.dtype).view(len(part), *extent[1:])[(slice(None), *wanted[1:])])
