"""What kernels a device has: the only module of this package that asks what kind a device is.

Kernels were shown right on CUDA alone, so ROCm, whose devices torch calls `cuda`, too, and XPU have none of them here: what they
compute with instead is what a CPU does.
"""

import logging
from functools import cache

import torch

_log = logging.getLogger(__name__)

HOSTS = ("cpu", "meta")

AMPERE, HOPPER = (8, 0), 9
"""Compute capability of A100, from which on GPUs have kernels of 16 bits; the major one of H100 and H200."""

GROUPS = (9, 10)
"""Major compute capabilities for which torch has a kernel of several products at once: Hopper, and Blackwell of data centers."""

MOST_GROUPS = 1023
"""How many products that kernel makes at once: a thread of one block prepares each."""


def draws_initial_weights(device: torch.device) -> bool:
    """Whether initial weights are drawn on the device, by CUDA's generator (`forge_core.draws`)."""
    return device.type == "cuda"


def is_hopper(device: torch.device) -> bool:
    """Whether cuDNN's attention, and FlashAttention-3, were made for this device."""
    return _is_nvidia(device) and torch.cuda.get_device_capability(device)[0] == HOPPER


def has_flex(device: torch.device, wanted: bool = False) -> bool:
    """Whether flex attention is compiled for the device. Warns once of an accelerator without, where it is `wanted`."""
    if wanted and not _is_nvidia(device) and device.type not in HOSTS:
        _tell(
            f"attention: this accelerator ({_kind(device)}) has no tested flex attention; documents, windows and soft "
            "caps use a mask of length x length, as on a CPU; data.documents = 'ignore' needs no mask"
        )
    return _is_nvidia(device)


def takes_lengths(device: torch.device) -> bool:
    """Whether the device has attention by lengths of documents (FlashAttention: Ampere and later)."""
    return _is_nvidia(device) and torch.cuda.get_device_capability(device) >= AMPERE


def groups_fault(device: torch.device, dtype: torch.dtype, groups: int) -> str:
    """Why the device has no kernel for the products of so many experts; "" where it has, and for a CPU.

    Elsewhere torch multiplies group by group, and the host waits for the device before each such product: `_grouped_mm_fallback`.
    """
    if device.type in HOSTS:
        return ""
    if not _is_nvidia(device):
        return f"grouped_mm is tested on NVIDIA GPUs only, not on {_kind(device)}"
    found = torch.cuda.get_device_capability(device)
    if found[0] not in GROUPS:
        return f"grouped_mm has a kernel for compute capability 9 and 10, not {found[0]}.{found[1]}"
    if groups > MOST_GROUPS:
        return f"grouped_mm has a kernel for {MOST_GROUPS} experts at most, not {groups}"
    return "" if dtype == torch.bfloat16 else f"grouped_mm has a kernel for bf16, not {dtype}"


def warn_of_loop(device: torch.device, fault: str) -> None:
    """Says once that experts are multiplied one by one on an accelerator, and why."""
    if device.type not in HOSTS:
        _tell(f"model.moe: experts are multiplied one by one, and each layer waits for the device: {fault}")


@cache
def _tell(text: str) -> None:
    _log.warning("%s", text)


def _kind(device: torch.device) -> str:
    return "ROCm" if device.type == "cuda" else device.type


def _is_nvidia(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None
