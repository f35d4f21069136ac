"""The order of copies: while the device works on one buffer, the host works on the other, and neither gets ahead.

To the host, the copy of the next chunk is queued before the host looks at this one. To the device, the host reads the next chunk
while the copy of this one runs. A buffer is used again only when its copy is over and its bytes were taken.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Self

import torch

from forge_ckpt.transfer.device import DeviceTransfer, Landing, way_to


class PinnedBuffer:
    """One buffer of a way, and the copy that may be using it."""

    def __init__(self, way: DeviceTransfer, memory: torch.Tensor) -> None:
        self._way, self._memory = way, memory
        self._part = memory
        self._landing: Landing | None = None

    def receive(self, source: torch.Tensor) -> None:
        """Queues a copy of flat bytes to the host."""
        self._part = self._memory[: source.numel()]
        self._landing = self._way.copy(self._part, source)

    def lend(self) -> Generator[memoryview]:
        """One view of what was received."""
        self.wait()
        yield from lend(self._part)

    def send(self, target: torch.Tensor, read: Callable[[memoryview], None]) -> None:
        """Has the host read bytes, then queues their copy to a flat target."""
        self._part = self._memory[: target.numel()]
        read(self._part.numpy().data)
        self._landing = self._way.copy(target, self._part)

    def wait(self) -> None:
        """Returns when no copy uses the buffer."""
        landing, self._landing = self._landing, None
        if landing is not None:
            landing()


class DoubleBuffer:
    """Two slots for each device, made when it first takes one; leaving the context waits for every copy.

    Args:
        size: bytes of a slot.
        way: where copies go; None for a device whose memory the host can use.
    """

    def __init__(self, size: int, way: Callable[[torch.device, int], DeviceTransfer | None] = way_to) -> None:
        self._size, self._way = size, way
        self._slots: dict[torch.device, deque[PinnedBuffer]] = {}

    def take(self, device: torch.device) -> PinnedBuffer | None:
        """The slot that was not taken last, once its copy is over; None where none is needed."""
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
    """The bytes of flat tensors of uint8, none longer than a slot, in their order. Those of a CPU are not copied.

    A view is released when the next one is asked for, because its memory is written again.
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
            del source  # it may be of a copy that was made for it, which is not kept while the next one is made
        if before is not None:
            yield from before.lend()


def to_device(target: torch.Tensor, read: Callable[[memoryview], None], turns: DoubleBuffer) -> None:
    """Fills a flat tensor of uint8, not longer than a slot, with what `read` puts into the memory that it is given.

    What is queued on the device later finds the bytes there; the host does not before `turns` end.
    """
    slot = turns.take(target.device)
    if slot is None:
        read(target.numpy().data)
    else:
        slot.send(target, read)


def lend(memory: torch.Tensor) -> Generator[memoryview]:
    """One view of a tensor of the host, of no use to whom keeps it."""
    with memory.numpy().data as view:
        yield view
