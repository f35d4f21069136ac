"""What this machine's processor is good at, as far as can be seen without torch."""

import platform
from collections.abc import Mapping
from pathlib import Path

BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16", "svebf16"})
"""Flags of processors that multiply bf16 numbers themselves: x86's in `flags`, Arm's in `Features`."""
ACCELERATORS = ("dev/nvidiactl", "dev/nvidia0", "dev/kfd", "dev/dxg")
"""Device files of CUDA and ROCm."""


def flags(root: Path = Path("/")) -> frozenset[str]:
    """Flags of the first processor in /proc/cpuinfo; empty where the file does not exist."""
    for line in _lines(root):
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def name(root: Path = Path("/")) -> str:
    """What the processor calls itself."""
    models = (line.partition(":")[2].strip() for line in _lines(root) if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine()


def multiplies_bf16(root: Path = Path("/")) -> bool | None:
    """Whether the processor has units for bf16; None where it does not tell."""
    found = flags(root)
    return bool(found & BF16_FLAGS) if found else None


def has_accelerator(root: Path = Path("/")) -> bool:
    """Whether the system shows a GPU; drivers may still be missing."""
    return any((root / file).exists() for file in ACCELERATORS)


def hides_accelerators(environment: Mapping[str, str]) -> bool:
    """Whether the environment says that no GPU is to be used, so that work runs on the CPU."""
    return any(environment.get(name, "0") in ("", "-1") for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"))


def idle_accelerator(device: str, environment: Mapping[str, str], root: Path = Path("/")) -> str | None:
    """A sentence where a GPU is shown and work runs on another `device` type, unless the environment hides GPUs; else None."""
    if device != "cpu" or hides_accelerators(environment) or not has_accelerator(root):
        return None
    return (
        "this machine shows a GPU, but torch cannot use it, and all work runs on the CPU: `forge-train doctor` says why and what "
        "to install; CUDA_VISIBLE_DEVICES= says that it is meant"
    )


def slow_bf16(root: Path = Path("/")) -> str | None:
    """A sentence about bf16 on this machine where it would be computed without units for it, else None."""
    if multiplies_bf16(root) is not False or has_accelerator(root):
        return None
    return (
        f"this machine has no GPU, and its processor ({name(root)}) has no bf16 units: bf16 products can be 400 times slower "
        "than fp32 here"
    )


def _lines(root: Path) -> list[str]:
    try:
        return (root / "proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return []
