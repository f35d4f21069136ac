"""Why a run ends. Every rank ends after the same step, because the request travels with the step's reduction."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

from forge_core.errors import ForgeError

if TYPE_CHECKING:
    from forge_ckpt.fence import Fence

FINISHED = "finished"
STOPPED = "asked to stop"

_LOOK_SECONDS = 5.0
"""Between two looks for a newer job; each reads a small file."""


class TrainingError(ForgeError):
    """Training cannot go on; no update was made with the bad numbers."""

    exit_code = 3


@dataclass
class Stop:
    """Watches for the last step, for signals on any rank, for steps whose numbers are not finite, and for another job in the
    run's directory."""

    max_steps: int
    patience: int = 10
    asked: bool = False
    agreed: bool = False
    bad: int = 0
    fence: "Fence | None" = None
    looked: float = 0.0

    def wanted(self) -> bool:
        """Whether this rank wants the run to end after the current step."""
        if not self.asked and time.monotonic() - self.looked > _LOOK_SECONDS:
            self.asked = self.superseded()
        return self.asked

    def superseded(self) -> bool:
        """Looks whether another job has started in the run's directory; on rank 0."""
        self.looked = time.monotonic()
        return self.fence is not None and self.fence.lost()

    def check(self) -> None:
        """Before a run that ends writes its last words; collective.

        Raises:
            Superseded: another job has started in the run's directory.
        """
        if self.fence is not None:
            self.fence.check()

    def after(self, result: Any) -> None:
        """Reads a step's verdicts: the host synchronisation of the step.

        Raises:
            TrainingError: `patience` steps in a row were skipped.
        """
        numbers = result.numbers()
        self.agreed = numbers["stop"] > 0
        self.bad = self.bad + 1 if numbers["skipped"] else 0
        if self.bad >= self.patience:
            raise TrainingError(
                f"{self.bad} steps in a row had a loss or gradient norm that is not finite (last: loss {numbers['loss']}, "
                f"norm {numbers['grad_norm']}); none of them changed the weights. Lower the learning rate or look at the "
                "data, then start again: the run resumes from its newest checkpoint"
            )

    def reason(self, state: Any) -> str:
        """Why the run ends before the next step; empty while it goes on."""
        if state.step >= self.max_steps:
            return FINISHED
        return STOPPED if self.agreed else ""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, SIGTERM and SIGINT ask for a stop after the current step; a second one ends the process at once."""

        def ask(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 (the signature of a handler)
            self.asked = True
            signal.signal(number, signal.SIG_DFL)

        watched = (signal.SIGTERM, signal.SIGINT)
        previous = [(number, signal.signal(number, ask)) for number in watched]
        try:
            yield
        finally:
            for number, handler in previous:
                signal.signal(number, handler)
