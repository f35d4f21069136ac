"""Copies tensors from and to bytes in host memory, through two pinned buffers if the device has its own memory."""

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import prod
from typing import Self

import torch

from forge_ckpt.format.manifest import CHUNK_BYTES, ITEMSIZE
from forge_ckpt.format.rank_files import RankFile
from forge_core.errors import CheckpointError
from forge_core.protocols.checkpoint import Piece, Store

_log = logging.getLogger(__name__)
Landing = Callable[[], object]
"""Returns when a copy has finished. Until then, neither side may be written, and the target may not be read."""


@dataclass(frozen=True)
class DeviceTransfer:
    """A method to copy bytes between a device and the host.

    Attributes:
        memory: (bytes,) uint8 host memory; source or target of every copy.
        copy: `copy(into, source)` starts a copy between flat uint8 tensors, after all work that is queued on the device.
    """

    memory: torch.Tensor
    copy: Callable[[torch.Tensor, torch.Tensor], Landing]


def way_to(device: torch.device, size: int) -> DeviceTransfer | None:
    """Returns the fastest transfer with `size` bytes of host memory; None for the CPU, which needs no copy.

    If memory cannot be pinned, the host waits in each copy.
    """
    if device.type == "cpu":
        return None
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type == device.type:  # memory can only be pinned for this accelerator
        try:
            return DeviceTransfer(torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True), partial(queued, device))
        except RuntimeError as cause:
            _log.info("no host memory was pinned, so the host waits in each copy between it and %s: %s", device, cause)
    return DeviceTransfer(torch.empty(size, dtype=torch.uint8, device="cpu"), waited)


def queued(device: torch.device, into: torch.Tensor, source: torch.Tensor) -> Landing:
    """Queues the copy on the device; waiting for it does not wait for work that is queued later."""
    into.copy_(source, non_blocking=True)
    event = torch.Event(device, enable_timing=False)
    event.record(torch.accelerator.current_stream(device))  # the default is the current device's stream
    return event.synchronize


def waited(into: torch.Tensor, source: torch.Tensor) -> Landing:
    """Copies synchronously."""
    into.copy_(source)
    return lambda: None


class PinnedBuffer:
    """One buffer of a transfer, and the copy that may be using it."""

    def __init__(self, way: DeviceTransfer, memory: torch.Tensor) -> None:
        self._way, self._memory = way, memory
        self._part = memory
        self._landing: Landing | None = None

    def receive(self, source: torch.Tensor) -> None:
        """Queues a copy of flat bytes to the host."""
        self._part = self._memory[: source.numel()]
        self._landing = self._way.copy(self._part, source)

    def lend(self) -> Generator[memoryview]:
        """Yields one view of the received bytes."""
        self.wait()
        yield from lend(self._part)

    def send(self, target: torch.Tensor, read: Callable[[memoryview], None]) -> None:
        """Reads bytes into the buffer, then queues their copy to a flat target."""
        self._part = self._memory[: target.numel()]
        read(self._part.numpy().data)
        self._landing = self._way.copy(target, self._part)

    def wait(self) -> None:
        """Returns when no copy uses the buffer."""
        landing, self._landing = self._landing, None
        if landing is not None:
            landing()


class DoubleBuffer:
    """Two slots for each device, created at its first use; leaving the context waits for all copies.

    Args:
        size: bytes per slot.
        way: returns the transfer of a device; None if the host can use the device's memory.
    """

    def __init__(self, size: int, way: Callable[[torch.device, int], DeviceTransfer | None] = way_to) -> None:
        self._size, self._way = size, way
        self._slots: dict[torch.device, deque[PinnedBuffer]] = {}

    def take(self, device: torch.device) -> PinnedBuffer | None:
        """Returns the slot that was not taken last, after its copy has finished; None if no slot is needed."""
        if device not in self._slots:
            way = self._way(device, 2 * self._size)
            self._slots[device] = deque(PinnedBuffer(way, memory) for memory in way.memory.split(self._size)) if way else deque()
        slots = self._slots[device]
        if not slots:
            return None
        slots.rotate(1)
        slots[0].wait()
        return slots[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for slots in self._slots.values():
            for slot in slots:
                slot.wait()


def to_host(sources: Iterable[torch.Tensor], turns: DoubleBuffer) -> Generator[memoryview]:
    """Yields the bytes of flat uint8 tensors, each at most as long as a slot, in order. CPU tensors are not copied.

    A view is released when the next one is requested, because its memory is reused.
    """
    with turns:
        before: PinnedBuffer | None = None
        for source in sources:
            slot = turns.take(source.device)
            if slot is not None:
                slot.receive(source)
            if before is not None:
                yield from before.lend()
            if slot is None:
                yield from lend(source)
            before = slot
            del source  # it may be a temporary copy, which must be freed before the next one is created
        if before is not None:
            yield from before.lend()


def to_device(target: torch.Tensor, read: Callable[[memoryview], None], turns: DoubleBuffer) -> None:
    """Fills a flat uint8 tensor, at most as long as a slot, with the bytes that `read` writes into host memory.

    Work that is queued on the device later sees the bytes; the host sees them only after leaving the context of `turns`.
    """
    slot = turns.take(target.device)
    if slot is None:
        read(target.numpy().data)
    else:
        slot.send(target, read)


def lend(memory: torch.Tensor) -> Generator[memoryview]:
    """Yields one view of a host tensor, which is released afterwards."""
    with memory.numpy().data as view:
        yield view


DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEMSIZE if hasattr(torch, name)}
"""Dtypes of `ITEMSIZE` that the installed torch supports."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(tensor: torch.Tensor, name: str) -> str:
    """Returns the name of a tensor's dtype.

    Raises:
        CheckpointError: checkpoints do not support the dtype, or the tensor is not a plain dense tensor.
    """
    if tensor.dtype not in _NAMES:
        raise CheckpointError(f"{name}: {tensor.dtype} cannot be stored; known: {', '.join(DTYPES)}")
    if tensor.is_meta or tensor.layout != torch.strided or hasattr(tensor, "placements"):
        raise CheckpointError(f"{name}: a piece holds a plain dense tensor, not one that is meta, sparse or distributed")
    return _NAMES[tensor.dtype]


def byte_chunks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the bytes of a tensor in chunks, on its device; a contiguous tensor is not copied."""
    flat = _flat_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())
    for start in range(0, flat.numel(), CHUNK_BYTES):
        yield flat[start : start + CHUNK_BYTES]


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the memory of a contiguous tensor as uint8, shared; `reshape(-1)` may keep an odd stride if a size is 1."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def file_of(pieces: Sequence[Piece]) -> RankFile:
    """Returns the file of these pieces. While a chunk is hashed and written, the next one is copied from the device."""

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
    """Copies the overlap with a stored box into a live tensor.

    Args:
        store: the store of the file.
        path, start: file and byte offset of the stored box.
        source: offset and extent of the stored box in the global tensor.
        target: the live tensor, with the stored dtype.
        offset: offset of the live tensor's box in the global tensor.
        turns: buffers with slots of `CHUNK_BYTES`; a target on a device is filled when their context ends.
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
    """Fills a tensor with the `wanted` part of a stored box that begins at byte `start`, at most `CHUNK_BYTES` at a time."""
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
    # Reads whole rows, and selects the wanted part on the device of the tensor, after the copy.
    rows = min(CHUNK_BYTES // row_bytes, len(into))
    staging = torch.empty(rows * row_bytes, dtype=torch.uint8, device=into.device)
    for row in range(0, len(into), rows):
        part = into[row : row + rows]
        whole = staging[: len(part) * row_bytes]
        to_device(whole, partial(read, start + row * row_bytes), turns)
        part.copy_(whole.view(into.dtype).view(len(part), *extent[1:])[(slice(None), *wanted[1:])])
