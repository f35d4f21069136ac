"""Ends a run whose evaluations no longer get better."""

from collections.abc import Mapping
from typing import Any

from forge_core.protocols.run import Hook, Run, StepResult
from forge_train.hooks.evaluation.results import Improvement, Mode


class EarlyStopHook(Hook):
    """Ends the run, with a checkpoint and exit code 0, when `patience` evaluations in a row were not better than the best one.

    A start after that ends at once, unless `patience` is larger by then.
    """

    def __init__(self, metric: str, mode: Mode = "min", patience: int = 3, min_delta: float = 0.0) -> None:
        self.improvement = Improvement(metric, mode, min_delta)
        self.patience = patience
        self.waited = 0

    def start(self, run: Run) -> None:
        """Looks at an evaluation that an earlier start had left, and whether that start had come to an end."""
        self._look(run)
        self._judge(run)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Looks at the evaluation of this step, if there was one."""
        if self._look(run):
            self._judge(run)

    def state(self) -> Mapping[str, Any]:
        """The best result, its step, and the evaluations since."""
        kept = self.improvement.state()
        return {**kept, "waited": self.waited} if kept else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` gave."""
        if self.improvement.load_state(state):
            self.waited = state["waited"]

    def _look(self, run: Run) -> bool:
        better = self.improvement.look(run)
        if better is not None:
            self.waited = 0 if better else self.waited + 1
        return better is not None

    def _judge(self, run: Run) -> None:
        if self.waited >= self.patience:
            found = self.improvement
            best = f"{found.best:.6g} of step {found.step}" if found.best is not None else "no finite result"
            run.stop.end(f"{found.metric} was not better than {best} in {self.waited} evaluations")
