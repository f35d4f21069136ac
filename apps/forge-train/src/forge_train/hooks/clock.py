"""Time that a run spends on other things than training, so that throughput is that of training."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from forge_core.protocols.run import Run


@contextmanager
def pause(run: Run) -> Iterator[None]:
    """Adds the time of the block to `run.paused`, in seconds. Evaluation and saving run inside one."""
    started = perf_counter()
    try:
        yield
    finally:
        run.paused = paused(run) + perf_counter() - started


def paused(run: Run) -> float:
    """Seconds that the run has spent inside `pause` blocks."""
    return getattr(run, "paused", 0.0)


class Stopwatch:
    """Training time and tokens since it was last read."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._mark = self._now()

    def _now(self) -> tuple[float, int, int]:
        return perf_counter() - paused(self._run), self._run.state.step, self._run.state.tokens

    def lap(self) -> tuple[float, int, int]:
        """(seconds, steps, tokens) since the last lap; read it only when the device has caught up."""
        before, self._mark = self._mark, self._now()
        seconds, steps, tokens = (new - old for new, old in zip(self._mark, before, strict=True))
        return seconds, int(steps), int(tokens)
