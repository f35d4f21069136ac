"""What a device says of itself: one place for accelerators of every kind."""

from typing import Any

import torch


def name(device: torch.device) -> str:
    """What the device calls itself, such as `NVIDIA H200`; of a CPU its type."""
    return device.type if device.type == "cpu" else _module(device).get_device_name(device)


def memory(device: torch.device) -> int | None:
    """Bytes of an accelerator, taken or not; None where it does not say, and for a CPU, whose memory other processes share."""
    ask = None if device.type == "cpu" else getattr(_module(device), "mem_get_info", None)
    return None if ask is None else int(ask(device)[1])


def take_peaks(device: torch.device) -> dict[str, int]:
    """Memory of an accelerator since the last call; empty for a CPU.

    `device_memory` (bytes in tensors at most), `device_memory_reserved` (bytes held by the allocator at most) and
    `device_memory_retries` (how often, of the process so far, it had to give back what it held to find room: each one stops the
    device; smaller micro-batches, or fewer fragments).
    """
    if device.type == "cpu":
        return {}
    module = _module(device)
    stats = module.memory_stats(device)
    module.reset_peak_memory_stats(device)
    keys = {
        "device_memory": "allocated_bytes.all.peak",
        "device_memory_reserved": "reserved_bytes.all.peak",
        "device_memory_retries": "num_alloc_retries",
    }
    return {said: int(stats[key]) for said, key in keys.items() if key in stats}


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)
