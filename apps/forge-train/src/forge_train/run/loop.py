"""The training loop, read from top to bottom. What happens around a step is a hook; what happens in one is `Step`."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from forge_parallel.accelerator import deterministic
from forge_train.resilience.memory import noted_when_full
from forge_train.run.run import Run


def fit(run: Run) -> str:
    """Trains until the run is finished or asked to stop; returns why it ended.

    Raises:
        TrainingError: too many steps had a loss or gradient that is not finite, or the state after the last one is not.
        OutOfMemory: a step did not fit; the next start takes smaller micro-batches.
        Superseded: another job has started in the run's directory.
    """
    run.hook_calls(run, "start")
    with deterministic(run.job.train.deterministic), planned(run.job.train.collect_every) as collect:
        for batches, cursor in run.phases.drawn("data", run.data.from_cursor(run.state.cursor)):
            if run.stop.reason(run.state):
                break
            run.begin_step(batches)
            run.hook_calls(run, "before_step")
            with noted_when_full(run):
                result = run.step(batches, stop=run.stop.wanted(), trace=run.wants_trace)
            run.hook_calls(run, "before_update", result)
            with run.phases("optimizer"):
                run.update(result)
            run.state.advance(cursor, run.tokens_per_step)
            run.conclude(result)
            run.hook_calls(run, "after_step", result)
            run.settle()
            collect(run.state.step)
    run.judge()
    run.stop.check()
    run.check()
    run.hook_calls(run, "finish")
    return run.stop.reason(run.state) or "data exhausted"


@contextmanager
def planned(every: int | None) -> Iterator[Callable[[int], None]]:
    """Python looks for garbage at the same steps on all ranks; one that does so alone keeps all others waiting.

    Inside, garbage in cycles is collected by the function that this gives, called with the number of each complete step: at
    multiples of `every`. What was made before is not looked at again until the end. With None, Python chooses by itself.
    """
    if every is None:
        yield lambda _: None
        return

    def collect(step: int) -> None:
        if step % every == 0:
            gc.collect()

    chosen_by_python = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield collect
    finally:
        gc.unfreeze()
        if chosen_by_python:
            gc.enable()
