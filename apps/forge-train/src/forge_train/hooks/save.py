"""Checkpoints at the right steps."""

from typing import TYPE_CHECKING, Any

from forge_core.protocols.run import Hook
from forge_train.hooks.clock import pause

if TYPE_CHECKING:
    from forge_train.components.hooks import Save


class SaveHook(Hook):
    """Saves every `checkpoint.every` steps and when the run ends; a step that is saved is not saved again."""

    def __init__(self, config: "Save", run: Any) -> None:
        self.config = config
        self.saved = 0  # step 0 is the initial weights, which seed and recipe give back

    def start(self, run: Any) -> None:
        """A run that starts at a step larger than 0 was restored from a checkpoint of that step."""
        self.saved = run.state.step

    def after_step(self, run: Any, result: Any) -> None:
        """Saves when due."""
        every = run.job.checkpoint.every
        if every and run.state.step % every == 0:
            self.save(run)

    def finish(self, run: Any) -> None:
        """Saves the last step, unless it is saved."""
        self.save(run)

    def save(self, run: Any) -> None:
        """Writes a checkpoint of this step, once. All ranks enter."""
        if run.state.step == self.saved:
            return
        with pause(run):
            run.save()
        self.saved = run.state.step
