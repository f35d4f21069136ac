"""Checkpoints at the right steps."""

from typing import TYPE_CHECKING, Any

from forge_train.hooks.periodic import Periodic

if TYPE_CHECKING:
    from forge_train.components.hooks import Save


class SaveHook(Periodic):
    """Saves every `checkpoint.every` steps and when the run ends; a step that is saved is not saved again."""

    def __init__(self, config: "Save", run: Any) -> None:
        super().__init__(run.job.checkpoint.every)

    def start(self, run: Any) -> None:
        """Step 0 is what seed and recipe give back; a larger one was restored from a checkpoint of that step."""
        self.acted = run.state.step

    def act(self, run: Any) -> None:
        """Writes a checkpoint of this step."""
        run.save()
