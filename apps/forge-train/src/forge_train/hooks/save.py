"""Hook `save`: saves checkpoints."""

from dataclasses import dataclass

from forge_core.protocols.run import Run, StepResult
from forge_train.hooks.periodic import Periodic, pause
from forge_train.process.stop import STOPPED


@dataclass(kw_only=True)
class Save(Periodic):
    """Saves a checkpoint every `checkpoint.every` steps and at the end, once per step.

    It also saves step 0 with `checkpoint.first`, and at the request of another hook, even a step that is saved already. After a
    stop request, it saves only if enough time is left.
    """

    def __post_init__(self) -> None:
        self.every = 0
        self.left_out = False

    def start(self, run: Run) -> None:
        """Saves step 0 if `checkpoint.first` is set; a step from which the run resumed is already saved."""
        self.every = run.job.checkpoint.every
        self.acted = run.state.step
        if run.job.checkpoint.first and not run.resumed:
            run.requests.save = True
        self._save_due(run)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Saves if the step is due or another hook requests it."""
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
        """Saves this step, in the foreground or the background; skips the save if too little time is left before the stop."""
        run.requests.save = False
        self.left_out = run.stop.reason(run.state) == STOPPED and not run.saves.may_begin()
        if not self.left_out:
            run.save()

    def _save_due(self, run: Run) -> None:
        if run.requests.save:
            self.acted = -1
            self.once(run)
