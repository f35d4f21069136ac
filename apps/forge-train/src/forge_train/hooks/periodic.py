"""Base class of hooks that act every N steps; their time does not count as training time."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from forge_core.protocols.run import Hook, Run, StepResult
from forge_train.process.stop import STOPPED

_LOOK = 8


def length_limit(run: Run) -> int | None:
    """Returns the maximum number of tokens, prompt included, with which a run's model can generate; None without a limit."""
    limits = getattr(run.job.model, "max_length", None), getattr(run.model.parts[0], "cache_limit", None)
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


class Periodic(Hook):
    """Acts every N steps (0 = never) and at the end; never twice at one step. All ranks act together.

    The time of the action does not count as training time.

    Attributes:
        every: number of steps N, a key of most subclasses.
        leisurely: True if the action is skipped at the end of a run that was asked to stop, which may have only seconds to save.
        left: True if a stop request interrupted the action; the run that resumes does it first.
    """

    leisurely = False
    left = False
    acted = -1

    every: int

    def start(self, run: Run) -> None:
        """Acts if a stop request interrupted the action in an earlier start."""
        if self.left:
            self.once(run)

    def state(self) -> Mapping[str, Any]:
        """Returns whether the action was interrupted."""
        return {"left": True} if self.left else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` gave."""
        self.left = state.get("left", False)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Acts if the step is due."""
        if self.every and run.state.step % self.every == 0:
            self.once(run)

    def finish(self, run: Run) -> None:
        """Acts on the last weights, unless the hook already acted at the last step."""
        if not (self.leisurely and run.stop.reason(run.state) == STOPPED):
            self.once(run)

    def once(self, run: Run) -> None:
        """Acts, unless the hook already acted at this step."""
        if run.state.step != self.acted:
            self.acted = run.state.step
            self.left = False
            run.watch.enter(f"hook {self._name} after step {run.state.step}", self._name)
            run.judge()  # waits for the device, so that the pause is measured correctly, and learns whether the run is to end
            with pause(run):
                self.act(run)

    def leaves(self, run: Run, doing: str, count: int) -> bool:
        """Collective at every eighth `count`: returns True if a stop request should interrupt the action."""
        if count % _LOOK == 0:
            run.watch.enter(doing, self._name)
            self.left = run.stop.agree(run.topology)
        return self.left

    @property
    def _name(self) -> str:
        return (self.state_key or type(self).__name__).rpartition(":")[2]

    def act(self, run: Run) -> None:
        """Does the action; subclasses implement it."""
        raise NotImplementedError


@contextmanager
def pause(run: Run) -> Iterator[None]:
    """Adds the time of the `with` block to `run.clock.paused`, as for evaluation and saving."""
    started = perf_counter()
    try:
        yield
    finally:
        run.clock.paused += perf_counter() - started


class Stopwatch:
    """Measures training time, steps and tokens since its last reading."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._mark = self._now()

    def _now(self) -> tuple[float, int, int]:
        return perf_counter() - self._run.clock.paused, self._run.state.step, self._run.state.tokens

    def lap(self) -> tuple[float, int, int]:
        """Returns (seconds, steps, tokens) since the last lap; call it only after the host has waited for the device."""
        before, self._mark = self._mark, self._now()
        seconds, steps, tokens = (new - old for new, old in zip(self._mark, before, strict=True))
        return seconds, int(steps), int(tokens)
