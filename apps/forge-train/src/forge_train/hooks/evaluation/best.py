"""Keeps the checkpoint with the best result of an evaluation."""

from collections.abc import Mapping
from typing import Any

from forge_core.protocols.run import Hook, Run, StepResult
from forge_train.hooks.evaluation.results import Improvement, Mode

MARK = "best"
"""File next to the checkpoints whose one line names the best one."""


class BestHook(Hook):
    """Where an evaluation is better than all before, hook `save` saves this step, the file `best` names that checkpoint, and
    retention spares it until a better one is durable. Initial weights do not count."""

    def __init__(self, metric: str, mode: Mode = "min") -> None:
        self.improvement = Improvement(metric, mode)

    def start(self, run: Run) -> None:
        """Says again which one was best, and looks at an evaluation that an earlier start had left."""
        if self.improvement.best is not None:
            run.marks[MARK] = self.improvement.step
        self._look(run)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Looks at the evaluation of this step, if there was one."""
        self._look(run)

    def finish(self, run: Run) -> None:
        """Looks at the evaluation of the end."""
        self._look(run)

    def state(self) -> Mapping[str, Any]:
        """The best result and its step."""
        return self.improvement.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` gave."""
        self.improvement.load_state(state)

    def _look(self, run: Run) -> None:
        if run.state.step and self.improvement.look(run):
            run.marks[MARK] = run.state.step
            run.due = True
