"""Base class of hooks that act every N steps, and the time that they take, which does not count as training time."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import perf_counter
from typing import Any

from forge_core.protocols.run import Hook, Run, StepResult
from forge_train.process.stop import STOPPED

_LOOK = 8


def length_limit(run: Run) -> int | None:
    """The most tokens, prompt and new ones together, that the model of a run generates within; None where it states no limit."""
    limits = getattr(run.job.model, "max_length", None), getattr(run.model.parts[0], "cache_limit", None)
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


class Periodic(Hook):
    """Acts every N steps (0 = never) and once more at the end; never twice at one step. All ranks act together.

    The time that it takes does not count as training time.

    Attributes:
        leisurely: not done when the run was asked to stop: there may be seconds left to save, and the run goes on later.
        left: the action was interrupted because the run was asked to stop; the run that resumes does it first.
    """

    leisurely = False

    def __init__(self, every: int) -> None:
        self.every = every
        self.acted = -1
        self.left = False

    def start(self, run: Run) -> None:
        """Does what an earlier start of the run did not finish."""
        if self.left:
            self.once(run)

    def state(self) -> Mapping[str, Any]:
        """Whether an action was interrupted."""
        return {"left": True} if self.left else {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes what `state` gave."""
        self.left = state.get("left", False)

    def after_step(self, run: Run, result: StepResult) -> None:
        """Acts when due."""
        if self.every and run.state.step % self.every == 0:
            self.once(run)

    def finish(self, run: Run) -> None:
        """Acts on the last weights, unless the last step already did."""
        if not (self.leisurely and run.stop.reason(run.state) == STOPPED):
            self.once(run)

    def once(self, run: Run) -> None:
        """Acts, unless it did at this step."""
        if run.state.step != self.acted:
            self.acted = run.state.step
            self.left = False
            run.watch.enter(f"hook {self._name} after step {run.state.step}", self._name)
            run.judge()  # the device has caught up, so the pause is one; and whether the run is to end is known
            with pause(run):
                self.act(run)

    def leaves(self, run: Run, doing: str, count: int) -> bool:
        """Collective at every eighth `count`, for what takes long: whether to leave it, since the run was asked to stop."""
        if count % _LOOK == 0:
            run.watch.enter(doing, self._name)
            self.left = run.stop.agree(run.topology)
        return self.left

    @property
    def _name(self) -> str:
        return (self.state_key or type(self).__name__).rpartition(":")[2]

    def act(self, run: Run) -> None:
        """The action."""
        raise NotImplementedError


@contextmanager
def pause(run: Run) -> Iterator[None]:
    """Adds the time of the block to `run.clock.paused`. Evaluation and saving run inside such a block."""
    started = perf_counter()
    try:
        yield
    finally:
        run.clock.paused += perf_counter() - started


class Stopwatch:
    """Training time and tokens since it was last read."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._mark = self._now()

    def _now(self) -> tuple[float, int, int]:
        return perf_counter() - self._run.clock.paused, self._run.state.step, self._run.state.tokens

    def lap(self) -> tuple[float, int, int]:
        """(seconds, steps, tokens) since the last lap; read it only when the device has caught up."""
        before, self._mark = self._mark, self._now()
        seconds, steps, tokens = (new - old for new, old in zip(self._mark, before, strict=True))
        return seconds, int(steps), int(tokens)
