"""The manifest of a checkpoint: its tensors, the boxes in its files, and proof that the boxes cover every tensor exactly once.

Needs no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from forge_core.errors import CheckpointError

CHUNK_BYTES = 4 << 20
"""Number of bytes that are copied, hashed, and written or read at a time."""

ITEMSIZE: dict[str, int] = {
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float16", "bfloat16", "uint16", "int16"), 2),
    **dict.fromkeys(("float32", "uint32", "int32"), 4),
    **dict.fromkeys(("float64", "complex64", "uint64", "int64"), 8),
    "complex128": 16,
}
"""Bytes per element of every supported dtype, by its torch name."""


Table = np.ndarray
MAX_IRREGULAR = 16_384
"""Maximum number of boxes that are compared in pairs, because no straight cut separates them; more are refused."""


def cover_fault(shape: Table, offset: Table, extent: Table) -> str | None:
    """Returns why the boxes do not cover a tensor of `shape` (D,) exactly once; None if they do.

    Disjoint boxes inside the tensor cover it if their volumes sum to its volume. The caller ensures that the volume of the
    tensor fits int64, so every sum here does, too.
    """
    inside = (offset >= 0) & (extent >= 1) & (extent <= shape) & (offset <= shape - extent)
    if not inside.all():
        bad = int(np.flatnonzero(~inside.all(axis=1))[0])
        return f"box {_text(offset[bad], extent[bad])} is not inside shape {shape.tolist()}"
    pair = overlap(offset, offset + extent)
    if pair is not None:
        first, second = pair
        return f"boxes {_text(offset[first], extent[first])} and {_text(offset[second], extent[second])} overlap"
    covered, wanted = int(extent.prod(axis=1).sum()), int(shape.prod())
    if covered != wanted:
        return f"{wanted - covered} of {wanted} elements are not covered by any box"
    return None


def overlap(low: Table, high: Table) -> tuple[int, int] | None:
    """Returns two boxes [low, high) that share an element, or None.

    Straight cuts split the boxes into groups, dimension by dimension; a box that is alone in its group overlaps no other. Sharded
    layouts are split at once; groups that no cut splits (a pinwheel) are compared in pairs.

    Raises:
        ValueError: a group of more than `MAX_IRREGULAR` boxes cannot be split.
    """
    count, dims = low.shape
    groups = [(np.arange(count), 0, 0)]
    while groups:
        members, dim, failed = groups.pop()
        if len(members) < 2:
            continue
        if failed == dims:
            pair = _overlap_in_pairs(members, low, high)
            if pair is not None:
                return pair
            continue
        starts = low[members, dim]
        order = np.argsort(starts, kind="stable")
        reach = np.maximum.accumulate(high[members[order], dim])
        cuts = np.flatnonzero(starts[order[1:]] >= reach[:-1]) + 1
        following = (dim + 1) % dims
        if cuts.size == 0:
            groups.append((members, following, failed + 1))
        elif cuts.size < len(members) - 1:
            groups.extend((part, following, 1) for part in np.split(members[order], cuts) if len(part) > 1)
    return None


def _overlap_in_pairs(members: Table, low: Table, high: Table) -> tuple[int, int] | None:
    if len(members) > MAX_IRREGULAR:
        raise ValueError(f"{len(members)} boxes cannot be separated by straight cuts; at most {MAX_IRREGULAR} are supported")
    low, high = low[members], high[members]
    for index in range(len(members) - 1):
        rest = slice(index + 1, None)
        meets = ((low[rest] < high[index]) & (low[index] < high[rest])).all(axis=1)
        if meets.any():
            return int(members[index]), int(members[index + 1 + int(np.argmax(meets))])
    return None


def meeting(offset: Table, extent: Table, low: Table, high: Table) -> Table:
    """Returns the indices of the boxes that share an element with [low, high)."""
    return np.flatnonzero(((offset < high) & (offset + extent > low)).all(axis=1))


def _text(offset: Table, extent: Table) -> str:
    return "[" + ", ".join(f"{low}:{low + size}" for low, size in zip(offset.tolist(), extent.tolist(), strict=True)) + "]"


_MAX_DIMS, _MAX_NAME = 16, 1024
_MAX_TENSOR_BYTES = 1 << 60
_MAX_TOTAL_BYTES = 1 << 62


@dataclass(frozen=True)
class TensorInfo:
    """One global tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return volume(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class PieceTable:
    """All stored boxes in columns, in the order of files and bytes; D is the largest number of dimensions of a tensor.

    Attributes:
        tensor, file: (P,) int64 indices into the manifest's tensors and files.
        offset, extent: (P, D) int64, padded with 0 and 1.
        start, length: (P,) int64, byte offset in the file and number of bytes.
        checksum: P times 16 bytes, xxh3_128.
    """

    tensor: np.ndarray
    file: np.ndarray
    offset: np.ndarray
    extent: np.ndarray
    start: np.ndarray
    length: np.ndarray
    checksum: bytes

    def __len__(self) -> int:
        return len(self.tensor)


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint; `build` and `decode` ensure that the boxes cover every tensor exactly once."""

    step: int
    generation: str
    world: int
    tensors: tuple[TensorInfo, ...]
    files: tuple[tuple[str, int], ...]
    pieces: PieceTable
    meta: Mapping[str, Any]

    @cached_property
    def index(self) -> dict[str, int]:
        """Positions of the tensors by name."""
        return {tensor.name: position for position, tensor in enumerate(self.tensors)}

    @cached_property
    def by_tensor(self) -> tuple[np.ndarray, np.ndarray]:
        """Piece indices grouped by tensor (P,), and the borders of the groups (tensors + 1,)."""
        return _grouped(self.pieces.tensor, len(self.tensors))

    @property
    def bytes(self) -> int:
        """Total bytes of all tensors."""
        return sum(size for _, size in self.files)


def volume(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def build(
    *,
    step: int,
    generation: str,
    world: int,
    tensors: Sequence[TensorInfo],
    files: Sequence[tuple[str, int]],
    tensor: np.ndarray,
    file: np.ndarray,
    offset: np.ndarray,
    extent: np.ndarray,
    checksum: bytes,
    meta: Mapping[str, Any],
) -> Manifest:
    """Completes and checks the columns of a manifest.

    Raises:
        CheckpointError: boxes leave a gap, overlap, exceed their tensor, or do not match the size of their file; the message
            names the tensors.
    """
    if sum(info.bytes for info in tensors) > _MAX_TOTAL_BYTES:  # ensures that no sum below overflows int64
        raise CheckpointError(f"the tensors of one checkpoint hold more than {_MAX_TOTAL_BYTES} bytes")
    dims = max([1, *(len(info.shape) for info in tensors)])
    shapes = np.ones((len(tensors), dims), dtype=np.int64)
    for position, info in enumerate(tensors):
        shapes[position, : len(info.shape)] = info.shape
    _check_cover(tensors, shapes, tensor, offset, extent)
    itemsize = np.array([ITEMSIZE[info.dtype] for info in tensors], dtype=np.int64)
    length = extent.prod(axis=1) * itemsize[tensor] if len(tensor) else np.zeros(0, dtype=np.int64)
    ends = np.cumsum(length)
    borders = np.searchsorted(file, np.arange(len(files) + 1))
    before = np.concatenate([np.zeros(1, dtype=np.int64), ends])[borders]
    start = ends - length - before[file] if len(tensor) else length
    for (name, size), held in zip(files, np.diff(before).tolist(), strict=True):
        if size != held:
            raise CheckpointError(f"{name} has {size} bytes, but its pieces have {held}")
    pieces = PieceTable(tensor, file, offset, extent, start, length, checksum)
    return Manifest(step, generation, world, tuple(tensors), tuple(files), pieces, meta)


def _check_cover(
    tensors: Sequence[TensorInfo], shapes: np.ndarray, tensor: np.ndarray, offset: np.ndarray, extent: np.ndarray
) -> None:
    order, borders = _grouped(tensor, len(tensors))
    offset, extent = offset[order], extent[order]
    faults = []
    for position, (low, high) in enumerate(zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True)):
        info = tensors[position]
        dims = max(1, len(info.shape))
        if high - low == 1 and (offset[low] == 0).all() and (extent[low] == shapes[position]).all():
            continue
        try:
            fault = cover_fault(shapes[position, :dims], offset[low:high, :dims], extent[low:high, :dims])
        except ValueError as cause:
            fault = str(cause)
        if fault:
            faults.append(f"{info.name}: {fault}")
    if faults:
        more = f"\n  and {len(faults) - 20} more" if len(faults) > 20 else ""
        raise CheckpointError("\n  ".join(["boxes do not cover every tensor exactly once:", *faults[:20]]) + more)


def _grouped(tensor: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    # numpy sorts 16-bit integers by radix, several times faster
    order = np.argsort(tensor.astype(np.uint16) if count <= 1 << 16 else tensor, kind="stable")
    return order, np.searchsorted(tensor[order], np.arange(count + 1))


def check_tensor(name: Any, dtype: Any, shape: tuple[Any, ...]) -> None:
    """Refuses names, dtypes and shapes that checkpoints do not support (at save and at load).

    Raises:
        ValueError: the name, dtype or shape is not supported.
    """
    need(
        isinstance(name, str) and 0 < len(name) <= _MAX_NAME and name.isprintable(),
        f"{str(name)[:80]!r} is an invalid tensor name",
    )
    need(isinstance(dtype, str) and dtype in ITEMSIZE, f"{name}: dtype {str(dtype)[:80]!r} is unknown")
    need(len(shape) <= _MAX_DIMS and all(map(is_whole, shape)), f"{name}: {str(shape)[:200]} is not a valid shape")
    need(volume([max(size, 1) for size in shape]) * ITEMSIZE[dtype] <= _MAX_TENSOR_BYTES, f"{name}: too large")


def is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 60


def need(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
