"""The training loop, read from top to bottom, and `train`, which runs it again after a rollback.

What happens around a step is a hook; what happens in one is `Step`. A rollback assembles the run anew within the same processes,
as a start does, so it restores what a resume restores, in any layout. Its first action is to save that state again with the later
data position, so that later starts go on from there, without the data that the run has read since.
"""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from forge_core.protocols.data import Cursor
from forge_parallel.accelerator import deterministic
from forge_train.process.stop import RolledBackTooOften, TrainingError
from forge_train.run.health import RollBack
from forge_train.run.micro_batch import note_out_of_memory
from forge_train.run.observers import rescue
from forge_train.run.run import Run

_log = logging.getLogger(__name__)


def fit(run: Run) -> str:
    """Trains until the run is finished or asked to stop; returns why it ended.

    Raises:
        TrainingError: too many steps had a loss or gradient that is not finite, or the state after the last one is not.
        OutOfMemory: a step did not fit; the next start takes smaller micro-batches.
        Superseded: another job has started in the run's directory.
    """
    run.hook_calls(run, "start")
    with deterministic(run.job.train.deterministic), periodic_gc(run.job.train.collect_every) as collect:
        for batches, cursor in run.phases.drawn("data", run.data.from_cursor(run.state.cursor)):
            if run.stop.reason(run.state):
                break
            run.begin_step(batches)
            run.hook_calls(run, "before_step")
            with note_out_of_memory(run):
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
def periodic_gc(every: int | None) -> Iterator[Callable[[int], None]]:
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


@dataclass(frozen=True)
class Back:
    """Where a run goes back to.

    Attributes:
        step: of the checkpoint.
        cursor: the data position of this rank from there on.
        rollbacks, lr_scale: of `Health`.
    """

    step: int
    cursor: Cursor
    rollbacks: int
    lr_scale: float

    def take(self, run: Run) -> None:
        """Gives a run that was restored from the checkpoint the position that it goes on from; its hook `save` saves that."""
        run.state.cursor = self.cursor
        run.health.rollbacks, run.health.lr_scale = self.rollbacks, self.lr_scale
        run.due = True


def train(build: Callable[[Back | None], Run]) -> tuple[Run, str]:
    """Collective: trains what `build` assembles, anew each time that it goes back; the last run, and why it ended.

    Raises:
        TrainingError: there is nothing to go back to, or as `fit`.
        RolledBackTooOften: it went back `train.max_rollbacks` times before.
    """
    back = None
    while True:
        run = build(back)
        try:
            return run, fit(run)
        except RollBack as wish:
            back = way_back(run, str(wish))
            run.hook_calls(run, "leave")
            run.close()
        except Exception as error:
            rescue(run, error)
            raise
        finally:
            for tracker in run.trackers:
                tracker.close()  # also after a failure: what was written last says most about it
        del run
        gc.collect()  # model, optimizer and loader make room for the next ones


def way_back(run: Run, why: str) -> Back:
    """Collective: where a run goes back to; says so.

    Raises:
        TrainingError: there is nothing to go back to.
        RolledBackTooOften: it went back often enough.
    """
    most, health = run.job.train.max_rollbacks, run.health
    if health.rollbacks >= most:
        raise RolledBackTooOften(
            f"{why}, after {most} rollbacks (train.max_rollbacks): lower the learning rate or check the data. {health.advice()}"
        )
    step = run.good_step()
    if step is None:
        raise TrainingError(f"{why}, without a checkpoint to go back to: {health.advice()}")
    back = Back(step, run.state.cursor, health.rollbacks + 1, health.lr_scale * run.job.train.rollback_lr)
    slower = f"; learning rate from now on times {back.lr_scale:.4g}" if back.lr_scale != 1 else ""
    if health.warns:
        _log.warning(
            "%s: going back to step %d, and on without the data of steps %d to %d (rollback %d of %d%s)",
            why, step, step + 1, run.state.step, back.rollbacks, most, slower,
        )  # fmt: skip
    return back
