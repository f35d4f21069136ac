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

NATIVE = (9, 4) if torch.version.hip else (8, 9)
"""Compute capability from which GPUs multiply float8 numbers: MI300; Ada, Hopper and later."""

GROUPED = (9, 10)
"""Major compute capabilities with a float8 product of several matrices at once: Hopper, and Blackwell of data centers."""


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
    native = device.type == "cuda" and torch.cuda.get_device_capability(device) >= NATIVE
    return _emulates(wanted, device, native, "float8 products")


def emulates_experts(wanted: Literal["auto"] | bool, device: torch.device, compute: torch.dtype) -> bool:
    """The same for the products of stacked experts, whose kernel fewer GPUs have, and which gives bf16 only.

    Raises:
        PlanError: as above, or the device has them, but in another precision than `compute`.
    """
    native = device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device)[0] in GROUPED
    chosen = _emulates(wanted, device, native, "float8 products of stacked experts")
    if not chosen and compute != torch.bfloat16:
        raise PlanError(
            f"transforms.float8.experts: {_named(device)} supports bf16 results only; use precision.compute = 'bf16', or "
            "transforms.float8.emulate = true"
        )
    return chosen


def _emulates(wanted: Literal["auto"] | bool, device: torch.device, native: bool, what: str) -> bool:
    if wanted is False and not native:
        raise PlanError(f"transforms.float8.emulate = false, but {_named(device)} has no {what}; use 'auto' or true")
    if wanted == "auto" and not native and device.type == "cuda":
        warnings.warn(f"{_named(device)} has no {what}: they are emulated, which is slower than bf16", stacklevel=3)
    return not native if wanted == "auto" else wanted


def _named(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"the device {device.type!r}"


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
