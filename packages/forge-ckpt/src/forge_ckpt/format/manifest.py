"""What a checkpoint holds: tensors, files, and the boxes in them; `codec` turns it into the JSON file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from forge_ckpt.format.boxes import cover_fault
from forge_ckpt.format.elements import ITEMSIZE
from forge_core.errors import CheckpointError

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
class Pieces:
    """All stored boxes in columns, in the order of files and of bytes inside each; D is the largest rank of a tensor.

    Attributes:
        tensor, file: (P,) int64 indices into the manifest's tensors and files.
        offset, extent: (P, D) int64, padded with 0 and 1.
        start, length: (P,) int64, bytes inside the file.
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
    """A checkpoint's contents; `build` and `decode` make only those that cover every tensor exactly once."""

    step: int
    generation: str
    world: int
    tensors: tuple[TensorInfo, ...]
    files: tuple[tuple[str, int], ...]
    pieces: Pieces
    meta: Mapping[str, Any]

    @cached_property
    def index(self) -> dict[str, int]:
        """Position of a tensor by name."""
        return {tensor.name: position for position, tensor in enumerate(self.tensors)}

    @cached_property
    def by_tensor(self) -> tuple[np.ndarray, np.ndarray]:
        """Piece indices grouped by tensor, and the border of each group: (P,), (tensors + 1,)."""
        return _grouped(self.pieces.tensor, len(self.tensors))

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
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
        CheckpointError: boxes leave a gap, overlap or leave their tensor, or do not add up to their file; names tensors.
    """
    if sum(info.bytes for info in tensors) > _MAX_TOTAL_BYTES:  # below, no sum of int64 overflows
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
            raise CheckpointError(f"{name} has {size} bytes, its pieces have {held}")
    pieces = Pieces(tensor, file, offset, extent, start, length, checksum)
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
    """Refuses names, dtypes and shapes that no checkpoint holds (at save and at load).

    Raises:
        ValueError: says what.
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
