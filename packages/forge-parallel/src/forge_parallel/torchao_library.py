"""Imports torchao on demand, without its log messages."""

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType

from forge_core.errors import ForgeError


def check_installed(key: str, extra: str) -> None:
    """Checks that torchao is installed, without importing it.

    Args:
        key: the key of the recipe that needs torchao.
        extra: the extra of this distribution that installs it.

    Raises:
        ForgeError: torchao is not installed; the message says how to install it.
    """
    if find_spec("torchao") is None:
        raise ForgeError(f'{key} needs torchao, which is not installed: pip install "forge-parallel[{extra}]"')


def require(module: str, key: str, extra: str) -> ModuleType:
    """Imports and returns a module of torchao, without its log messages about kernels that are not used here.

    Raises:
        ForgeError: see `check_installed`.
    """
    check_installed(key, extra)
    with _quiet("torchao", "torch.utils._pytree"):
        return importlib.import_module(module)


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Context in which these loggers log errors only."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
