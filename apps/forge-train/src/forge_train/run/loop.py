"""The training loop, read from top to bottom, and `train`, which runs it again after a rollback.

What happens around a step is a hook; what happens within a step is `Step`. A rollback starts the run again within the same
processes, so it restores what a resume restores, in any layout. The new start first saves that state with the later data
position, so that later starts continue from there, without the data that the run has read since.
"""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from forge_core.protocols.run import EndStatus
from forge_parallel.accelerator import deterministic
from forge_parallel.launch.limits import LearnedLimits
from forge_parallel.launch.process_group import limit
from forge_train.process.ranks import JobRanks
from forge_train.process.stop import STOPPED, RolledBackTooOften, TrainingError
from forge_train.run.health import RollBack
from forge_train.run.micro_batch import note_out_of_memory
from forge_train.run.observers import rescue
from forge_train.run.run import DATA, Run
from forge_train.run.start import Back, start_run
from forge_train.starts import recorded_end
from forge_train.trackers import close_all

if TYPE_CHECKING:
    from forge_train.recipe.load import Recipe

_log = logging.getLogger(__name__)


def fit(run: Run) -> str:
    """Trains until the run is finished or asked to stop; returns why it ended.

    Raises:
        TrainingError: too many steps had a loss or gradient that is not finite, or the state after the last one is not.
        OutOfMemory: a step did not fit; the next start takes smaller micro-batches.
        Superseded: another job has started in the run's directory.
    """
    run.calls(run, "start")
    with deterministic(run.job.train.deterministic), periodic_gc(run.job.train.collect_every) as collect:
        for batches, cursor in run.times.drawn("data", run.data.from_cursor(run.state.cursor)):
            if run.stop.reason(run.state):
                break
            run.begin_step(batches)
            run.calls(run, "before_step")
            with note_out_of_memory(run):
                result = run.step(batches, stop=run.stop.wanted(), trace=run.requests.trace)
            run.calls(run, "before_update", result)
            with run.times("optimizer"):
                run.update(result)
            run.state.advance(cursor, run.tokens_per_step)
            run.conclude(result)
            run.calls(run, "after_step", result)
            run.settle()
            collect(run.state.step)
    run.judge()
    run.stop.check()
    run.saves.check()
    run.calls(run, "finish")
    return run.stop.reason(run.state) or "data exhausted"


@contextmanager
def periodic_gc(every: int | None) -> Iterator[Callable[[int], None]]:
    """Python looks for garbage at the same steps on all ranks; one that does so alone keeps all others waiting.

    Inside, garbage in cycles is collected by the function that this gives, called with the number of each complete step: at
    multiples of `every`. What was there before is frozen until the end, so that no collection looks at it, unless the calling
    program has frozen objects itself: unfreezing would release those too. With None, Python chooses by itself.
    """
    if every is None:
        yield lambda _: None
        return

    def collect(step: int) -> None:
        if step % every == 0:
            gc.collect()

    chosen_by_python, freezes = gc.isenabled(), gc.get_freeze_count() == 0
    gc.collect()
    if freezes:
        gc.freeze()
    gc.disable()
    try:
        yield collect
    finally:
        if freezes:
            gc.unfreeze()
        if chosen_by_python:
            gc.enable()


def train(recipe: "Recipe", ranks: JobRanks, *, fresh: bool = False) -> tuple[Run, str]:
    """Collective: starts a run and trains it, and starts it again after each rollback.

    Returns:
        The last start of the run, and why it ended.

    Raises:
        TrainingError: there is nothing to go back to, or as `fit`.
        RolledBackTooOften: the run went back `train.max_rollbacks` times before.
    """
    parallel, watch, back = recipe.job.parallel, ranks.watch, None
    while True:
        watch.enter("going back" if back else "the start")
        watch.timeout = parallel.timeout  # the timeout of a step may be in force
        limit(watch.timeout, ranks.device)
        with ranks.signals.at_once() if back is None else nullcontext():
            run = start_run(recipe, ranks, fresh=fresh and back is None, back=back)
        watch.limits = LearnedLimits(parallel.least_timeout, waiting=(DATA,))
        with recorded_end(run) as ending:
            status: EndStatus = "killed"  # by a signal, which is an exception that nothing here handles
            try:
                ending.reason = fit(run)
                status = "killed" if ending.reason == STOPPED else "finished"
                return run, ending.reason
            except RollBack as wish:
                status = "running"
                back = way_back(run, str(wish))
                run.calls(run, "leave")
                run.saves.close()
            except Exception as error:
                status = "failed"
                rescue(run, error)
                raise
            finally:
                # also after a failure: the last values say most about it
                close_all(run.trackers, "running" if run.trackers and run.stop.superseded() else status)
        del run
        gc.collect()  # model, optimizer and loader make room for those of the next start


def way_back(run: Run, why: str) -> Back:
    """Collective: returns where a run goes back to, and logs it.

    Raises:
        TrainingError: there is nothing to go back to.
        RolledBackTooOften: the run went back `train.max_rollbacks` times before.
    """
    most, health = run.job.train.max_rollbacks, run.health
    if health.rollbacks >= most:
        raise RolledBackTooOften(
            f"{why}, after {most} rollbacks (train.max_rollbacks): lower the learning rate or check the data. "
            + run.saves.advice()
        )
    step = run.saves.good_step()
    if step is None:
        raise TrainingError(f"{why}, without a checkpoint to go back to: {run.saves.advice()}")
    back = Back(step, run.state.cursor, health.rollbacks + 1, health.lr_scale * run.job.train.rollback_lr)
    slower = f"; learning rate from now on times {back.lr_scale:.4g}" if back.lr_scale != 1 else ""
    if health.warns:
        _log.warning(
            "%s: going back to step %d, and on without the data of steps %d to %d (rollback %d of %d%s)",
            why, step, step + 1, run.state.step, back.rollbacks, most, slower,
        )  # fmt: skip
    return back
