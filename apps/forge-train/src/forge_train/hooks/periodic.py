"""What evaluation, sampling and saving have in common."""

from typing import Any

from forge_core.protocols.run import Hook
from forge_train.hooks.clock import pause
from forge_train.stop import STOPPED


class Periodic(Hook):
    """Acts every N steps (0 = never) and once more at the end; never twice at one step. All ranks act together.

    The time that it takes does not count as training time.

    Attributes:
        leisurely: not done when the run was asked to stop: there may be seconds left to save, and the run goes on later.
    """

    leisurely = False

    def __init__(self, every: int) -> None:
        self.every = every
        self.acted = -1

    def after_step(self, run: Any, result: Any) -> None:
        """Acts when due."""
        if self.every and run.state.step % self.every == 0:
            self.once(run)

    def finish(self, run: Any) -> None:
        """Acts on the last weights, unless the last step already did."""
        if not (self.leisurely and run.stop.reason(run.state) == STOPPED):
            self.once(run)

    def once(self, run: Any) -> None:
        """Acts, unless it did at this step."""
        if run.state.step != self.acted:
            self.acted = run.state.step
            with pause(run):
                self.act(run)

    def act(self, run: Any) -> None:
        """What is done."""
        raise NotImplementedError
