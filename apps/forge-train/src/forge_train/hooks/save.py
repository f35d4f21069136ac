"""Saves checkpoints."""

from forge_core.protocols.run import Run, StepResult
from forge_train.hooks.periodic import Periodic, pause
from forge_train.process.stop import STOPPED


class SaveHook(Periodic):
    """Saves every `checkpoint.every` steps, at step 0 with `checkpoint.first`, when another hook says that a step is due, and
    when the run ends; a step that is saved is not saved again, unless it became due since. A run that was asked to stop saves
    nothing more where the time that is left is too short for it."""

    def __init__(self) -> None:
        super().__init__(every=0)
        self.left_out = False

    def start(self, run: Run) -> None:
        """What was restored is saved already. Step 0 is what seed and recipe give back, so it is saved only on request."""
        self.every = run.job.checkpoint.every
        self.acted = run.state.step
        if run.job.checkpoint.first and not run.resumed:
            run.requests.save = True
        self._save_due(run)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Saves when due."""
        super().after_step(run, result)
        self._save_due(run)

    def finish(self, run: Run) -> None:
        """Saves the last step, and waits until it is durable."""
        super().finish(run)
        self._save_due(run)
        if not self.left_out:
            with pause(run):
                run.saves.finish()

    def act(self, run: Run) -> None:
        """Writes a checkpoint of this step, or begins to; not in too little time."""
        run.requests.save = False
        self.left_out = run.stop.reason(run.state) == STOPPED and not run.saves.may_begin()
        if not self.left_out:
            run.save()

    def _save_due(self, run: Run) -> None:
        if run.requests.save:
            self.acted = -1
            self.once(run)
