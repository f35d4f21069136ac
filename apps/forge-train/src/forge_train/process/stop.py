"""Requests that end a run. All ranks end after the same step, because the request is part of the step's all-reduce."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING

from forge_core.errors import ForgeError
from forge_core.protocols.model import Topology
from forge_core.protocols.run import RunState, StepResult

if TYPE_CHECKING:
    from forge_ckpt.checkpoint.fence import Fence

FINISHED = "finished"
STOPPED = "asked to stop"

REQUEUE = 75
"""Exit code of a run that stopped on request and can resume later: EX_TEMPFAIL, "try again later"."""

HOOK_FAILED = 9
"""Exit code of a run that finished training although an observing hook was switched off or failed at the end."""

FOLLOWS = 5
"""Exit code of a rank that ended because another rank failed."""

FAULTY = 6
"""Exit code of a rank whose machine has failed a probe."""

FULL = 8
"""Exit code of a rank that ran out of memory and recorded a micro-batch that may fit."""

_NOTED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_TWICE = (signal.SIGTERM, signal.SIGINT)
_SAME_SECONDS = 2.0

_LOOK_SECONDS = 5.0
"""Seconds between checks for a newer job in the directory; each check reads a small file."""


class TrainingError(ForgeError):
    """Training cannot continue; the weights were not updated with invalid numbers."""

    exit_code = 3


class RolledBackTooOften(ForgeError):
    """The run used all its rollbacks, and its steps were bad again."""

    exit_code = 7


class Interrupted(KeyboardInterrupt):
    """A signal ends this process before there is anything to save. Not an `Exception`, so that `except Exception` ignores it."""

    exit_code = REQUEUE


@contextmanager
def heard(note: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Calls `note` for stop signals inside the `with` block; main thread only. SIGHUP stays ignored if it was, as under nohup."""
    previous = []
    for number in _NOTED:
        handler = signal.getsignal(number)
        if not (number == signal.SIGHUP and handler is signal.SIG_IGN):
            previous.append((number, signal.signal(number, note)))
    try:
        yield
    finally:
        for number, handler in previous:
            signal.signal(number, handler)


class Signals:
    """Stop signals: SIGTERM and SIGINT, and those of schedulers and terminals, SIGUSR1, SIGUSR2 and SIGHUP.

    After the first signal, the run stops after its current step. A second SIGTERM or SIGINT ends the process at once; within two
    seconds it counts as the same request, because launchers forward signals. SIGHUP stays ignored if it was, as under nohup.

    Attributes:
        asked: name of the first signal; empty before one arrives.
    """

    def __init__(self) -> None:
        self.asked = ""
        self._when = 0.0
        self._at_once = False

    def listening(self) -> AbstractContextManager[None]:
        """Records signals inside the `with` block; main thread only."""
        return heard(self._note)

    def waited(self) -> float:
        """Returns the seconds since the first signal; 0 before one arrives."""
        return time.monotonic() - self._when if self.asked else 0.0

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Lets signals interrupt the `with` block, in which there is nothing to save yet.

        Raises:
            Interrupted: a signal arrived inside the block or before it.
        """
        self._at_once = True
        try:
            if self.asked:
                raise Interrupted(self._said())
            yield
        finally:
            self._at_once = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.asked:
            self.asked, self._when = signal.Signals(number).name, now
            if self._at_once:
                raise Interrupted(self._said())
        elif number in _TWICE and now - self._when > _SAME_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _said(self) -> str:
        return f"interrupted by {self.asked} before the first step; nothing was saved"


@dataclass
class Stop:
    """Decides when a run ends: at its last step, on a signal of any rank, or because another job took its directory over.

    Attributes:
        pause: the step after which the run pauses; None if it runs to its last step.
    """

    max_steps: int
    pause: int | None = None
    signals: Signals = field(default_factory=Signals)
    asked: bool = False
    agreed: bool = False
    fence: "Fence | None" = None
    looked: float = 0.0
    ended: str = ""

    def wanted(self) -> bool:
        """Returns True if this rank wants the run to end after the current step."""
        if not self.asked and time.monotonic() - self.looked > _LOOK_SECONDS:
            self.asked = self.superseded()
        return self.asked or bool(self.signals.asked)

    def agree(self, topology: Topology) -> bool:
        """Collective: returns True on all ranks if any rank wants the run to end; the loop then ends before its next step.

        Long work between steps calls this to stop early.
        """
        import torch

        if topology.size == 1:
            self.agreed = self.agreed or self.wanted()
        elif not self.agreed:
            self.agreed = bool(topology.all_reduce(torch.full((), float(self.wanted()), device=topology.device)) > 0)
        return self.agreed

    def superseded(self) -> bool:
        """Returns True if another job has started in the run's directory; rank 0 only."""
        self.looked = time.monotonic()
        return self.fence is not None and self.fence.lost()

    def check(self) -> None:
        """Collective: checks that this job still owns the run's directory, before the last writes of a run.

        Raises:
            Superseded: another job has started in the run's directory.
        """
        if self.fence is not None:
            self.fence.check()

    def after(self, result: StepResult) -> None:
        """Reads from the step's result whether any rank wants to stop; this is the host synchronization of the step."""
        self.agreed = result.numbers()["stop"] > 0

    def end(self, why: str) -> None:
        """Ends the run before the next step because it has reached its goal; all ranks must call this after the same step."""
        self.ended = why

    def reason(self, state: RunState) -> str:
        """Returns why the run ends before the next step; empty if it continues."""
        if self.agreed:
            return STOPPED  # also after the last step, since evaluations may remain
        if state.step >= self.max_steps:
            return FINISHED
        if self.pause is not None and state.step >= self.pause:
            return f"paused (train.stop_at = {self.pause})"
        return self.ended
