"""A device that is a queue of copies of the host: they happen when they are waited for and no sooner, or at once, or all of them
while the host is busy. A real one may do any of these.
"""

from collections.abc import Callable
from functools import partial

import torch

from forge_ckpt.format.tensor_bytes import DeviceTransfer

PACES = ["late", "early", "meanwhile"]
WRONG = 0xEE
"""What bytes are while their copy is under way."""


class Queue:
    """Copies in the order in which it was told, some time between the call and the wait.

    Attributes:
        pace: one of `PACES`; at `meanwhile` the test calls `catch_up` where the host is busy.
        said: what happened, in order.
    """

    def __init__(self, pace: str = "late") -> None:
        self.pace = pace
        self.said: list[str] = []
        self._waiting: list[Callable[[], object]] = []
        self._told = 0

    def way(self, _: torch.device, size: int) -> DeviceTransfer:
        self.said.append(f"{size} bytes")
        return DeviceTransfer(torch.full((size,), WRONG, dtype=torch.uint8), self._copy)

    def _copy(self, into: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        number = self._told
        self._told += 1
        self.said.append(f"queue {number}")
        into.fill_(WRONG)
        self._waiting.append(partial(into.copy_, source))
        if self.pace == "early":
            self.catch_up()

        def land() -> None:
            self.said.append(f"wait {number}")
            self.catch_up(number + 1)

        return land

    def catch_up(self, count: int | None = None) -> None:
        """Does the first copies, or all."""
        done = self._told - len(self._waiting)
        ready = self._waiting if count is None else self._waiting[: max(count - done, 0)]
        self._waiting = self._waiting[len(ready) :]
        for copy in ready:
            copy()
