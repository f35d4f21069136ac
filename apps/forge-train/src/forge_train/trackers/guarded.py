"""The one place where a failing tracker is kept from stopping a run."""

import importlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

from forge_core.errors import ForgeError
from forge_core.protocols.run import Tracker

_log = logging.getLogger(__name__)


class Guarded:
    """A tracker whose failures cost one warning; later ones are silent, and later writes are still tried."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self.warned = False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Passes on the values of optimizer step `step`."""
        self._try(lambda: self.tracker.write(step, values))

    def rewind(self, step: int) -> None:
        """Passes on that a run goes on after `step`; 0 is the start of a run."""
        self._try(lambda: self.tracker.rewind(step))

    def close(self) -> None:
        """Passes on that nothing more will be written."""
        self._try(self.tracker.close)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as cause:  # noqa: BLE001 - no error of a library, a disk or a network may stop training
            if not self.warned:
                self.warned = True
                what = type(self.tracker).__name__
                _log.warning("%s failed (%s: %s); the run goes on; later failures are silent", what, type(cause).__name__, cause)


def library(name: str, extra: str) -> Any:
    """Imports a library that a tracker needs, `extra` being the one of forge-train that installs it.

    Raises:
        ForgeError: it is not installed; says what to install.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as cause:
        if (cause.name or "").partition(".")[0] != name.partition(".")[0]:
            raise  # the library is there, and something that it needs is not: its own message says what
        raise ForgeError(
            f'tracker {extra!r} needs a library that is not installed: pip install "forge-train[{extra}]"'
        ) from cause
