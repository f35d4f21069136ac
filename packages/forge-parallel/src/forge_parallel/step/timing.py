"""Timed parts of a step, and numbers of the device that are read one step late.

Parts are named in profiles and timed in the steps that ask for it; in all other steps they cost nothing. On an accelerator a
time is that of the device, between two events in its queue, so work of the host, such as reading data ahead, does not count.
On a CPU it is that of the clock.
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
"""Of the names in profiles."""


class StepTimer:
    """The parts of the steps of one rank, one after another.

    Attributes:
        timed: whether parts that begin from now on are timed.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.timed = False
        self._device = device or torch.device("cpu")
        self._noted: list[tuple[str, Any, Any]] = []

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """The part of this name: `data`, `forward`, `backward`, `reduce`, `optimizer`, ..."""
        return self._noting(name) if self.timed or profiling() else nullcontext()

    def drawn(self, name: str, items: Iterable[T]) -> Iterator[T]:
        """The items of an iterator; drawing one is a part of the step."""
        source = iter(items)
        while True:
            with self(name):
                item = next(source, None)
            if item is None:
                return
            yield item

    def _mark(self) -> Any:
        """A moment: of the device's queue, or of the clock."""
        return perf_counter() if self._device.type == "cpu" else timed_event(self._device)

    def _between(self, before: Any, after: Any) -> float:
        return after - before if self._device.type == "cpu" else before.elapsed_time(after) / 1000

    def take(self) -> dict[str, float]:
        """Seconds of each part since the last call, and `other`, what lies between them: with it they sum to the time from the
        first one's begin to the last one's end. The device has passed that: read a number of the step first."""
        if not self._noted:
            return {}
        found: dict[str, float] = {}
        for name, before, after in self._noted:
            found[name] = found.get(name, 0.0) + self._between(before, after)
        whole = self._between(self._noted[0][1], self._noted[-1][2])
        self._noted.clear()
        return {**found, "other": max(0.0, whole - sum(found.values()))}

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
    """A few numbers that the host wants later.

    On an accelerator a copy into pinned memory is queued behind what makes them, and an event behind the copy: the device goes on
    while the host waits for that event. On a CPU there is nothing to wait for.

    Args:
        values: (n,) of any dtype.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self._values, self._arrived = values, None
        if values.device.type != "cpu":
            # The memory is used again as soon as this object is gone and the copy over: torch's allocator waits for it.
            self._values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
            self._arrived = event_behind(values.device)

    def numbers(self) -> list[float]:
        """They, as soon as they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.tolist()
