"""Signals to a sweep are for its runs: each one is passed on, and the sweep ends when they have saved."""

import signal
from contextlib import AbstractContextManager
from types import FrameType

from forge_train.process.stop import heard


class Asked:
    """How often this process was asked to stop, by a terminal, a scheduler or a user.

    Attributes:
        times: none while it was not.
        name: of the first signal.
    """

    def __init__(self) -> None:
        self.times = 0
        self.name = ""

    def listening(self) -> AbstractContextManager[None]:
        """Inside, signals are noted; in the main thread."""
        return heard(self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.times += 1
        self.name = self.name or signal.Signals(number).name
