"""How long a process works by itself, and how long it waits for others: by looking at the stack of its training thread.

Ranks that exchange tensors in every layer are all as slow as the slowest one, so the time of a step tells nothing about one of
them. Where it waits, its stack says.
"""

import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from forge_parallel.launch import hang_report

SECONDS = 0.005
"""Between two looks; what is measured of a step is off by about as much."""

_WAITS_FOR_DEVICE = "forge_parallel.step.timing"
"""Where the host waits for its device, which may itself wait for others."""


class OwnTime:
    """A thread that looks at the thread which made it, from `start` to `stop`.

    Args:
        counts: asked at each look whether the time counts, such as that of a step and not that of a save.
    """

    def __init__(self, counts: Callable[[], bool] = lambda: True) -> None:
        self._counts, self._main = counts, threading.get_ident()
        self._own = self._waited = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, name="forge-own-time", daemon=True)

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        self._done.set()
        if self._thread.is_alive():
            self._thread.join(5)

    def take(self) -> tuple[float, float]:
        """Seconds that counted since the last call: by itself, and waiting for others."""
        found, self._own, self._waited = (self._own, self._waited), 0.0, 0.0
        return found

    def _look(self) -> None:
        before = time.monotonic()
        while not self._done.wait(SECONDS):
            now = time.monotonic()
            if self._counts():
                if _waits(sys._current_frames().get(self._main)):
                    self._waited += now - before
                else:
                    self._own += now - before
            before = now


def _waits(frame: FrameType | None) -> bool:
    if frame is None:
        return False
    return hang_report.is_waiting([frame]) or frame.f_globals.get("__name__", "") == _WAITS_FOR_DEVICE
