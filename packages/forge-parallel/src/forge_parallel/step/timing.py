"""Times the parts of a step, and reads numbers from the device one step late.

Parts are named in profiles, and timed only in the steps that request it; otherwise they cost nothing. On an accelerator, the time
is measured on the device between two events in its queue, so work of the host, such as reading data ahead, does not count. On a
CPU it is measured by the clock.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any, TypeVar

import torch

from forge_parallel.accelerator import event_behind, timed_event
from forge_parallel.torch_private import profiling

T = TypeVar("T")

PREFIX = "forge/"
"""Prefix of the names in profiles."""


class StepTimer:
    """Times the parts of one rank's steps.

    Attributes:
        timed: whether parts that begin from now on are timed.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.timed = False
        self._device = device or torch.device("cpu")
        self._noted: list[tuple[str, Any, Any]] = []

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Returns a context for the part `name`: `data`, `forward`, `backward`, `reduce`, `optimizer`, ..."""
        return self._noting(name) if self.timed or profiling() else nullcontext()

    def drawn(self, name: str, items: Iterable[T]) -> Iterator[T]:
        """Yields the items of an iterator and counts the time to get each of them as the part `name`."""
        source = iter(items)
        while True:
            with self(name):
                item = next(source, None)
            if item is None:
                return
            yield item

    def _mark(self) -> Any:
        """Returns a timestamp: an event in the device's queue, or the clock."""
        return perf_counter() if self._device.type == "cpu" else timed_event(self._device)

    def _between(self, before: Any, after: Any) -> float:
        return after - before if self._device.type == "cpu" else before.elapsed_time(after) / 1000

    def take(self) -> dict[str, float]:
        """Returns the seconds of each part since the last call, and the time between parts as `other`; together they are the time
        from the start of the first part to the end of the last. Read a number of the step first, so that the device is done."""
        if not self._noted:
            return {}
        seconds: dict[str, float] = {}
        for name, before, after in self._noted:
            seconds[name] = seconds.get(name, 0.0) + self._between(before, after)
        whole = self._between(self._noted[0][1], self._noted[-1][2])
        self._noted.clear()
        return {**seconds, "other": max(0.0, whole - sum(seconds.values()))}

    @contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        with torch.profiler.record_function(PREFIX + name) if profiling() else nullcontext():
            before = self._mark() if self.timed else None
            try:
                yield
            finally:
                if before is not None:
                    self._noted.append((name, before, self._mark()))


class DeferredRead:
    """Numbers of the device that the host reads later.

    On an accelerator, a copy into pinned memory is queued, followed by an event: the host waits for this event only, while the
    device goes on. On a CPU nothing waits.

    Args:
        values: (n,) of any dtype.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._values, self._arrived = values, None
        if values.device.type != "cpu":
            # torch's allocator reuses the pinned memory only after the copy is done, even if this object is deleted before.
            self._values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
            self._arrived = event_behind(values.device)

    def numbers(self) -> list[float]:
        """Returns the numbers; blocks until they are on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.tolist()
