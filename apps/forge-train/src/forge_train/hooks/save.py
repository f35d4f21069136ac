"""Saves checkpoints."""

from forge_core.protocols.run import Run
from forge_train.hooks.periodic import Periodic


class SaveHook(Periodic):
    """Saves every `checkpoint.every` steps and when the run ends; a step that is saved is not saved again."""

    def __init__(self) -> None:
        super().__init__(every=0)

    def start(self, run: Run) -> None:
        """Step 0 is what seed and recipe give back; a larger one was restored from a checkpoint of that step."""
        self.every = run.job.checkpoint.every
        self.acted = run.state.step

    def act(self, run: Run) -> None:
        """Writes a checkpoint of this step."""
        run.save()
