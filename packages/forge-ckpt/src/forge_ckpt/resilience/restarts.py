"""Local ranks that are started again when they fail, as long as that may help."""

from collections.abc import Callable, Mapping, Sequence
from types import FrameType

from forge_ckpt.resilience.fewer import Fewer
from forge_ckpt.resilience.local_ranks import FOLLOWS, Ended, run_local_ranks

FULL = 8
"""Exit code of a rank that ran out of memory, and has noted what may fit."""

FAULTY = 6
"""Exit code of a rank whose machine has failed a probe."""

AGAIN = (1, FOLLOWS, FAULTY, FULL)
"""Exit codes after which ranks are started again, besides every signal that they did not ask for: a fault of the program, the
loss of another rank, one of the machine, and a step that did not fit and will be cut into smaller parts. Others say that the same
would happen again, or that the end was asked for."""


class Passed:
    """Signals that this process gets and its ranks have to get: those that ask for an end."""

    def __init__(self) -> None:
        self.any = False
        self._new: list[int] = []

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler."""
        self.any = True
        self._new.append(number)

    def take(self) -> list[int]:
        """Those since the last call."""
        taken, self._new = self._new, []
        return taken


def supervise(
    command: Sequence[str],
    size: int,
    restarts: int,
    environment: Mapping[str, str],
    say: Callable[[str], None],
    signals: Passed | None = None,
    grace: float = 8.0,
    fewer: Fewer | None = None,
) -> int:
    """Runs ranks, and runs them again after a failure; the exit code of the last time. Each failure is said with its first cause.

    A rank that was ended by a signal counts as lost: exit code 5.

    Args:
        restarts: how often they are started again.
        signals: after one of them, nothing is started again.
        grace: see `local_ranks.run`.
        fewer: chooses smaller numbers of ranks after failures; without it, all are started each time.
    """
    signals = signals or Passed()
    life, places = 0, list(range(size))
    while True:
        ended = run_local_ranks(command, places, environment, life, grace, signals.take)
        code = FOLLOWS if ended.code < 0 else ended.code
        if code == 0 or signals.any or not _may_help(ended):
            return code
        if life >= restarts:
            say(f"{ended.why}; no restart is left of {restarts}")
            return code
        life += 1
        say(f"{ended.why}; restart {life} of {restarts}, from the newest verified checkpoint")
        if fewer is not None:
            places, told = fewer.after(ended, places)
            if told:
                say(told)


def _may_help(ended: Ended) -> bool:
    return ended.code < 0 or ended.code in AGAIN
