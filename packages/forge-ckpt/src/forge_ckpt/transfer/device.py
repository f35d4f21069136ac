"""What a device offers for copies: host memory that it reaches by itself, and an event that tells when a copy is over."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

_log = logging.getLogger(__name__)
Landing = Callable[[], object]
"""Returns when a copy is over; until then neither side of it may be written, nor what it fills be read."""


@dataclass(frozen=True)
class DeviceTransfer:
    """How bytes travel between a device and the host.

    Attributes:
        memory: of the host, (bytes,) uint8; every copy has one end in it.
        copy: `copy(into, source)` starts a copy between flat tensors of uint8, after all that the device was told before.
    """

    memory: torch.Tensor
    copy: Callable[[torch.Tensor, torch.Tensor], Landing]


def way_to(device: torch.device, size: int) -> DeviceTransfer | None:
    """The fastest way with `size` bytes of host memory; None for a CPU, whose memory is the host's already.

    Where memory cannot be pinned, the host waits inside each copy.
    """
    if device.type == "cpu":
        return None
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type == device.type:  # memory is pinned for that one only
        try:
            return DeviceTransfer(torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True), partial(queued, device))
        except RuntimeError as cause:
            _log.info("no host memory was pinned, so the host waits in each copy between it and %s: %s", device, cause)
    return DeviceTransfer(torch.empty(size, dtype=torch.uint8, device="cpu"), waited)


def queued(device: torch.device, into: torch.Tensor, source: torch.Tensor) -> Landing:
    """Leaves the copy to the device; waiting for it does not wait for what is queued later."""
    into.copy_(source, non_blocking=True)
    event = torch.Event(device, enable_timing=False)
    event.record(torch.accelerator.current_stream(device))  # without a stream: of the current device, maybe another one
    return event.synchronize


def waited(into: torch.Tensor, source: torch.Tensor) -> Landing:
    """A plain copy, over when it returns."""
    into.copy_(source)
    return lambda: None
