"""Signals to a sweep are for its runs: each one is passed on, and the sweep ends when they have saved."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_NOTED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Asked:
    """How often this process was asked to stop, by a terminal, a scheduler or a user.

    Attributes:
        times: none while it was not.
        name: of the first signal.
    """

    def __init__(self) -> None:
        self.times = 0
        self.name = ""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, signals are noted; in the main thread. SIGHUP stays ignored where it was, as under nohup."""
        previous = []
        for number in _NOTED:
            handler = signal.getsignal(number)
            if not (number == signal.SIGHUP and handler is signal.SIG_IGN):
                previous.append((number, signal.signal(number, self._note)))
        try:
            yield
        finally:
            for number, handler in previous:
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.times += 1
        self.name = self.name or signal.Signals(number).name
