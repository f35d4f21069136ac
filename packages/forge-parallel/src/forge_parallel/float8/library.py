"""torchao, imported when it is needed, and what the device can do."""

import importlib
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Literal

import torch

from forge_core.errors import ForgeError, PlanError
from forge_parallel import accelerator


def check_installed() -> None:
    """Looks for torchao without importing it.

    Raises:
        ForgeError: it is not installed; says what to install.
    """
    if find_spec("torchao") is None:
        raise ForgeError('transforms.float8 needs torchao, which is not installed: pip install "forge-parallel[float8]"')


def require() -> None:
    """Imports torchao without its chatter about kernels that are not used here.

    Raises:
        ForgeError: it is not installed; says what to install.
    """
    check_installed()
    with _quiet("torchao", "torch.utils._pytree"):
        importlib.import_module("torchao.float8")


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


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Inside, these loggers tell errors only."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
