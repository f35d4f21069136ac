"""Why a run ends. Every rank ends after the same step, because the request is part of the step's reduction."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING

from forge_core.errors import ForgeError
from forge_core.protocols.run import RunState, StepResult
from forge_core.protocols.topology import Topology

if TYPE_CHECKING:
    from forge_ckpt.checkpoint.fence import Fence

FINISHED = "finished"
STOPPED = "asked to stop"

REQUEUE = 75
"""Exit code of a run that was asked to stop and can go on later: EX_TEMPFAIL, "try again later"."""

HOOK_FAILED = 9
"""Exit code of a run that trained to its end while a hook that observes was switched off, or failed at the end."""

FOLLOWS = 5
"""Exit code of a rank that ended because of another one."""

FAULTY = 6
"""Exit code of a rank whose machine has failed a probe."""

FULL = 8
"""Exit code of a rank that ran out of memory, and has noted what may fit."""

_NOTED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_TWICE = (signal.SIGTERM, signal.SIGINT)
_SAME_SECONDS = 2.0

_LOOK_SECONDS = 5.0
"""Between two looks for a newer job; each reads a small file."""


class TrainingError(ForgeError):
    """Training cannot go on; no update was made with the bad numbers."""

    exit_code = 3


class RolledBackTooOften(ForgeError):
    """The run went back as often as it may, and its steps were bad again."""

    exit_code = 7


class Interrupted(KeyboardInterrupt):
    """A signal ends this process before there is anything to save. Not an `Exception`, so that nothing takes it for a failure."""

    exit_code = REQUEUE


@contextmanager
def heard(note: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Inside, signals that ask to stop call `note`; in the main thread. SIGHUP stays ignored where it was, as under nohup."""
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
    """What asks a run to stop: SIGTERM and SIGINT, and what schedulers and terminals send, SIGUSR1, SIGUSR2 and SIGHUP.

    The first one is noted, and a run stops after its step. A SIGTERM or SIGINT that comes more than two seconds after it ends the
    process at once; sooner, it is the same request on another way, as a launcher sends it on to processes that had it already.
    SIGHUP stays ignored where it was, as under nohup.

    Attributes:
        asked: the name of the first signal; empty while there was none.
    """

    def __init__(self) -> None:
        self.asked = ""
        self._when = 0.0
        self._at_once = False

    def listening(self) -> AbstractContextManager[None]:
        """Inside, signals are noted; in the main thread."""
        return heard(self._note)

    def waited(self) -> float:
        """Returns the seconds since the first signal; 0 while there was none."""
        return time.monotonic() - self._when if self.asked else 0.0

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside there is nothing to save yet, so a signal ends what is done.

        Raises:
            Interrupted: for a signal that comes inside, or has come before.
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
    """Watches for the last step, for signals on any rank, and for another job in the run's directory.

    Attributes:
        pause: the step after which this start ends, and another one goes on; None where it goes to the last one.
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
        """Whether this rank wants the run to end after the current step."""
        if not self.asked and time.monotonic() - self.looked > _LOOK_SECONDS:
            self.asked = self.superseded()
        return self.asked or bool(self.signals.asked)

    def agree(self, topology: Topology) -> bool:
        """Collective: for long work between steps, whether any rank wants the run to end. All get the same answer, and the
        loop ends before its next step."""
        import torch

        if topology.size == 1:
            self.agreed = self.agreed or self.wanted()
        elif not self.agreed:
            self.agreed = bool(topology.all_reduce(torch.full((), float(self.wanted()), device=topology.device)) > 0)
        return self.agreed

    def superseded(self) -> bool:
        """Looks whether another job has started in the run's directory; on rank 0."""
        self.looked = time.monotonic()
        return self.fence is not None and self.fence.lost()

    def check(self) -> None:
        """Collective: before a run that ends writes anything more.

        Raises:
            Superseded: another job has started in the run's directory.
        """
        if self.fence is not None:
            self.fence.check()

    def after(self, result: StepResult) -> None:
        """Reads whether any rank asked for a stop: the host synchronization of the step."""
        self.agreed = result.numbers()["stop"] > 0

    def end(self, why: str) -> None:
        """The run has reached what it was for: it ends before the next step. All ranks say so after the same step."""
        self.ended = why

    def reason(self, state: RunState) -> str:
        """Why the run ends before the next step; empty while it goes on."""
        if self.agreed:
            return STOPPED  # also after the last step: evaluations may be left
        if state.step >= self.max_steps:
            return FINISHED
        if self.pause is not None and state.step >= self.pause:
            return f"paused (train.stop_at = {self.pause})"
        return self.ended
