"""How far a long job is, said every few seconds."""

import time
from collections.abc import Callable

from forge_core.terminal import duration


class Progress:
    """Reports amount, share, rate and the time that is left; nothing before the first few seconds."""

    def __init__(self, what: str, total: int | None, unit: str, report: Callable[[str], None], every: float = 2.0) -> None:
        self.what, self.total, self.unit = what, total, unit
        self.done = 0
        self._report, self._every = report, every
        self._began = self._spoke = time.monotonic()

    def advance(self, amount: int) -> None:
        """Counts `amount` more as done."""
        self.done += amount
        now = time.monotonic()
        if now - self._spoke < self._every:
            return
        self._spoke = now
        rate = self.done / (now - self._began)
        share = f" ({self.done / self.total:.0%})" if self.total else ""
        left = f", {duration((self.total - self.done) / rate)} left" if self.total and rate else ""
        self._report(f"{self.what}: {self.done / 1e6:.1f} M {self.unit}{share}, {rate / 1e6:.2f} M/s{left}")

    @property
    def seconds(self) -> float:
        """Since the start."""
        return max(time.monotonic() - self._began, 1e-9)
