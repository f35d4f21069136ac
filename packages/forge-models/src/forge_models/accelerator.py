"""Kernels that a device supports: the only module of this package that distinguishes kinds of devices.

These kernels are tested on CUDA only. ROCm, whose devices torch also calls `cuda`, and XPU therefore use the same implementations
as a CPU.
"""

import logging
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch

_log = logging.getLogger(__name__)

HOSTS = ("cpu", "meta")

AMPERE, HOPPER = (8, 0), 9
"""Compute capability of A100, the minimum for 16-bit kernels; major compute capability of H100 and H200."""

GROUPS = (9, 10)
"""Major compute capabilities for which torch has a grouped product: Hopper, and Blackwell for data centers."""

MOST_GROUPS = 1023
"""Maximum number of products in one grouped product: each is prepared by one thread of a single block."""


def draws_initial_weights(device: torch.device) -> bool:
    """Whether initial weights are drawn on the device by CUDA's generator (`forge_core.specs`)."""
    return device.type == "cuda"


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Returns a context in which an accelerator is the current one of this thread, as kernels need; it does nothing for a CPU."""
    return torch.cuda.device(device if device.type == "cuda" else -1)


def is_hopper(device: torch.device) -> bool:
    """Whether the device is a Hopper GPU, for which cuDNN's attention and FlashAttention-3 are optimized."""
    return is_nvidia(device) and torch.cuda.get_device_capability(device)[0] == HOPPER


def has_flex(device: torch.device, wanted: bool = False) -> bool:
    """Whether flex attention is compiled for the device. If `wanted`, warns once about an accelerator without it."""
    if wanted and not is_nvidia(device) and device.type not in HOSTS:
        _tell(
            f"attention: this accelerator ({_kind(device)}) has no tested flex attention; documents, windows and soft "
            "caps use a mask of length x length, as on a CPU; data.documents = 'ignore' needs no mask"
        )
    return is_nvidia(device)


def takes_lengths(device: torch.device) -> bool:
    """Whether the device has attention with document lengths (FlashAttention: Ampere and later)."""
    return is_nvidia(device) and torch.cuda.get_device_capability(device) >= AMPERE


def groups_fault(device: torch.device, dtype: torch.dtype, groups: int) -> str:
    """Returns why the device has no grouped product for this number of experts; empty if it has one, or is a CPU.

    Without the kernel, torch multiplies one group after the other and synchronizes before each: `_grouped_mm_fallback`.
    """
    if device.type in HOSTS:
        return ""
    if not is_nvidia(device):
        return f"grouped_mm is tested on NVIDIA GPUs only, not on {_kind(device)}"
    found = torch.cuda.get_device_capability(device)
    if found[0] not in GROUPS:
        return f"grouped_mm has a kernel for compute capability 9 and 10, not {found[0]}.{found[1]}"
    if groups > MOST_GROUPS:
        return f"grouped_mm has a kernel for {MOST_GROUPS} experts at most, not {groups}"
    return "" if dtype == torch.bfloat16 else f"grouped_mm has a kernel for bf16, not {dtype}"


def warn_of_loop(device: torch.device, fault: str) -> None:
    """Warns once that experts are multiplied one by one on an accelerator, and why."""
    if device.type not in HOSTS:
        _tell(f"model.moe: experts are multiplied one by one, and each layer waits for the device: {fault}")


@cache
def _tell(text: str) -> None:
    _log.warning("%s", text)


def _kind(device: torch.device) -> str:
    return "ROCm" if device.type == "cuda" else device.type


def is_nvidia(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None
