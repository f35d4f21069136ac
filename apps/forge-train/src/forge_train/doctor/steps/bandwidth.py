"""How fast numbers are copied: in host memory, to and from the device, within the device's memory."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from forge_parallel.accelerator import name
from forge_train.doctor.peaks import peak
from forge_train.doctor.step import Check, Settings
from forge_train.doctor.steps.measure import device, fastest

_GPU_BYTES, _CPU_BYTES = 1 << 28, 1 << 25
_LINK = 10e9
"""Bytes per second that a PCIe 3.0 link of 16 lanes has at least; later ones have two to five times that."""
_HBM = 0.7


@dataclass(frozen=True)
class Copy:
    """One direction: what is copied where, and the bytes per second below which it counts as slow (0: never)."""

    name: str
    source: torch.Tensor
    target: torch.Tensor
    traffic: int
    least: float
    remedy: str = ""


def examine_bandwidth(_: Settings) -> Iterator[Check]:
    """The step. Traffic of a copy within one memory is counted twice: it is read and written."""
    here = device()
    length = _CPU_BYTES if here.type == "cpu" else _GPU_BYTES
    for copy in _copies(here, length):
        rate = copy.traffic / fastest(lambda: copy.target.copy_(copy.source, non_blocking=True), here)  # noqa: B023 (called at once)
        slow = rate < copy.least
        expected = f"{copy.least / 1e9:.0f} GB/s at least" if copy.least else "report only"
        remedy = copy.remedy if slow else ""
        yield Check(copy.name, "SLOW" if slow else "PASS", rate / 1e9, "GB/s", expected, remedy, "higher")


def _copies(here: torch.device, length: int) -> Iterator[Copy]:
    pageable = torch.ones(length, dtype=torch.uint8)
    yield Copy("host memory", pageable, torch.empty_like(pageable), 2 * length, 0.0)
    if here.type == "cpu":
        return
    pinned, there = pageable.pin_memory(), torch.empty(length, dtype=torch.uint8, device=here)
    link = "is the GPU in a slot of 16 lanes (nvidia-smi -q -d PCI), and the process on the GPU's NUMA node?"
    yield Copy("host to device, pinned", pinned, there, length, _LINK, link)
    yield Copy("device to host, pinned", there, pinned, length, _LINK, link)
    yield Copy("host to device, pageable", pageable, there, length, 0.0)
    yield Copy("device to host, pageable", there, pageable, length, 0.0)
    known = peak(name(here))
    least = known.memory * _HBM if known else 0.0
    remedy = "look for throttling and ECC (nvidia-smi -q -d PERFORMANCE,ECC), and for other processes on the GPU"
    yield Copy("device memory", there, torch.empty_like(there), 2 * length, least, remedy)
