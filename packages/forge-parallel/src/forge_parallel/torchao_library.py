"""torchao, imported when it is needed and without its chatter."""

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType

from forge_core.errors import ForgeError


def check_installed(key: str, extra: str) -> None:
    """Looks for torchao without importing it.

    Args:
        key: what needs it in a recipe.
        extra: of this distribution, which brings it.

    Raises:
        ForgeError: it is not installed; says what to install.
    """
    if find_spec("torchao") is None:
        raise ForgeError(f'{key} needs torchao, which is not installed: pip install "forge-parallel[{extra}]"')


def require(module: str, key: str, extra: str) -> ModuleType:
    """A module of torchao, imported without what it tells about kernels that are not used here.

    Raises:
        ForgeError: as above.
    """
    check_installed(key, extra)
    with _quiet("torchao", "torch.utils._pytree"):
        return importlib.import_module(module)


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
