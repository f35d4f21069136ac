"""A run that goes back: to its newest good checkpoint, and on from there without the data that it has read since.

It is assembled anew, as by a start, within the same processes: what a resume restores, in any layout, is what going back
restores. The first thing that it does is to save that state again, with the later data position, so that a later start goes on
from there.
"""

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass

from forge_core.protocols.data import Cursor
from forge_train.process.stop import RolledBackTooOften, TrainingError
from forge_train.run.health import RollBack
from forge_train.run.loop import fit
from forge_train.run.observers import rescue
from forge_train.run.run import Run

_log = logging.getLogger(__name__)


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
