"""Numbers on their way from a device to the host, so that who reads them waits for them and for nothing that was queued later."""

import torch

from forge_parallel.accelerator import event_behind


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
