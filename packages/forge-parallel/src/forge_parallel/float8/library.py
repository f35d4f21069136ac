"""torchao, imported when it is needed, and what the device can do."""

import warnings
from typing import Literal

import torch

from forge_core.errors import PlanError
from forge_parallel import accelerator, torchao_library

KEY, EXTRA = "transforms.float8", "float8"


def check_torchao() -> None:
    """Looks for torchao without importing it.

    Raises:
        ForgeError: it is not installed; says what to install.
    """
    torchao_library.check_installed(KEY, EXTRA)


def require_torchao() -> None:
    """Imports torchao's float8.

    Raises:
        ForgeError: it is not installed; says what to install.
    """
    torchao_library.require("torchao.float8", KEY, EXTRA)


def emulates(wanted: Literal["auto"] | bool, device: torch.device) -> bool:
    """Whether products are computed in fp32 on values that were rounded to float8.

    Raises:
        PlanError: the device's own float8 products were asked for, and it has none.
    """
    return _emulates(wanted, device, accelerator.float8_fault(device))


def emulates_experts(wanted: Literal["auto"] | bool, device: torch.device, compute: torch.dtype) -> bool:
    """The same for the products of stacked experts, whose kernel fewer GPUs have, and which gives bf16 only.

    Raises:
        PlanError: as above, or the device has them, but in another precision than `compute`.
    """
    chosen = _emulates(wanted, device, accelerator.float8_groups_fault(device))
    if not chosen and compute != torch.bfloat16:
        raise PlanError(
            f"transforms.float8.experts: {accelerator.name(device)} supports bf16 results only; use precision.compute = 'bf16', "
            "or transforms.float8.emulate = true"
        )
    return chosen


def _emulates(wanted: Literal["auto"] | bool, device: torch.device, fault: str) -> bool:
    if wanted is False and fault:
        raise PlanError(f"transforms.float8.emulate = false, but {fault}; use 'auto' or true")
    if wanted == "auto" and fault and device.type != accelerator.CPU.type:
        warnings.warn(
            f"{fault}: they are emulated, which is slower than bf16; leave out transforms.float8, or say emulate = true",
            stacklevel=3,
        )
    return bool(fault) if wanted == "auto" else wanted
