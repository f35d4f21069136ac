"""When and how a run's checkpoints are written: while training waits, or in the background.

A save that fails does not end a run: the next one tries again. Only the last save must succeed, unless the run was asked to stop
and too little time is left for a save, which `Grace` estimates from earlier saves.

A scheduler sends a signal before it ends a job, and kills the job after a grace period. Neither a killed save nor a skipped save
does harm, but a killed run has no exit code that makes the scheduler start it again.
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median

from forge_ckpt.background import BackgroundSaves, SaveResult
from forge_ckpt.checkpoint.save import check_room, draft_of
from forge_ckpt.checkpoint.write import SaveRequest, write
from forge_ckpt.world import ProcessGroupWorld
from forge_core.errors import CheckpointError, Superseded
from forge_core.protocols.checkpoint import Store
from forge_train.directory import forget
from forge_train.process.stop import Signals
from forge_train.run.checkpoints import Checkpoints, RunContent


@dataclass
class Saves:
    """The saves of one start of a run.

    Attributes:
        checkpoints: where they go.
        content: what they contain.
        signals: may ask the run to stop, which leaves `checkpoint.grace` seconds.
        background: writes while training goes on; None where training waits.
        asked: the newest step for which a save was requested; -1 if there was none.
        durable: the newest step that is saved; -1 if there is none.
        left_out: whether the last step was not saved because too little time was left.
        inside: for each save that has not ended, whether the loss was in its band at that step.
    """

    checkpoints: Checkpoints
    content: RunContent
    signals: Signals = field(default_factory=Signals)
    background: BackgroundSaves | None = None
    asked: int = -1
    durable: int = -1
    left_out: bool = False
    inside: dict[int, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.grace = Grace(self.content.decided.job.checkpoint.grace, os.environ, since=self.signals.waited)

    def reserve(self) -> None:
        """Collective: compares the room that checkpoints need with what the disk has, and takes the memory for background saves.

        Raises:
            CheckpointError: on every rank, when not even one checkpoint has room, or a host has too little memory for copies of
                its ranks' state.
        """
        job, checkpoints = self.content.decided.job, self.checkpoints
        with self.content.pieces() as state:
            most = job.checkpoint.most_kept(job.train.max_steps)
            if warning := check_room(checkpoints.store, state, checkpoints.world, most):
                self.content.health.warn(warning)
        if job.checkpoint.mode == "sync":
            return
        world = checkpoints.world
        apart = ProcessGroupWorld.apart() if world.size > 1 else world
        self.background = BackgroundSaves(checkpoints.store, world, apart, by=job.checkpoint.saver, busy=job.checkpoint.busy)
        with self.content.pieces() as state:
            self.background.reserve(state)

    def own(self, store: Store) -> None:
        """Collective: takes the store from every older job; saves may be written from now on."""
        fence = self.checkpoints.own(store)
        if self.background is not None:
            self.background.store, self.background.fence = store, fence

    def save(self) -> None:
        """Collective: writes a checkpoint of the current step, or begins to. `Run.save` judges the step first.

        A checkpoint that cannot be written is a warning, the same on all ranks.

        Raises:
            TrainingError: a parameter or the optimizer's state is not finite; nothing was written.
            Superseded: another job has started in the run's directory; nothing was written.
        """
        self.check()
        self.settle()
        request = self._request()
        if self.background is None:
            try:
                self._write(request)
            except Superseded:
                raise
            except CheckpointError as cause:
                self._failed(request.step, str(cause))
            return
        with self.content.pieces() as state:
            begun = self.background.save(state, request)
        if not begun:
            del self.inside[request.step]
            self.content.health.warn(
                f"step {request.step} was not saved, because the save before it is still being written. Save less often "
                "(checkpoint.every), or let training wait for it (checkpoint.busy = 'wait')"
            )

    def check(self) -> None:
        """Collective: checks that every value of the state is finite, once per step.

        Raises:
            TrainingError: a parameter or the optimizer's state is not finite.
        """
        self.checkpoints.check(self.content)

    def settle(self, wait: bool = False) -> None:
        """Collective: records saves that have ended in the background; with `wait`, waits for all that were begun.

        Raises:
            Superseded: one of them failed, because another job has started in the run's directory.
        """
        for outcome in self.background.settled(wait) if self.background is not None else ():
            self._ended(outcome)

    def may_begin(self) -> bool:
        """Collective: whether a run that was asked to stop has the time for a save. If some rank has not, all return False.

        A save that is under way in the background does not count: it is finished in any case.
        """
        replies = self.checkpoints.world.all_gather(f"{self.grace.lacks()} {self.grace.needed} {self.grace.left()}".encode())
        lacks, needed, left = max(tuple(map(float, reply.split())) for reply in replies)
        if not lacks:
            return True
        self.left_out = True
        self.content.health.warn(
            f"step {self._step} is not saved: a save takes {needed:.3g} s, and {max(left, 0):.3g} s are left until the "
            "scheduler ends this job. Started again, the run goes on from its newest checkpoint"
        )
        return False

    def finish(self) -> None:
        """Collective: returns when the newest step for which a save was requested is durable.

        Raises:
            CheckpointError: it cannot be written.
            Superseded: another job has started in the run's directory.
        """
        self.settle(wait=True)
        if self.asked == self._step and self.durable != self.asked:  # the save failed, or was left out
            self._write(self._request())

    def good_step(self) -> int | None:
        """Collective: returns the step that the run can go back to after bad steps; None if there is none."""
        self.settle(wait=True)  # a save that is under way may be the one to go back to
        return self.checkpoints.good_step(self.content.health)

    def advice(self) -> str:
        """Collective: returns how the user can go on after a failure, in one sentence."""
        self.settle(wait=True)
        return self.checkpoints.advice(self.content.health)

    def close(self) -> None:
        """Ends the saves in the background; what is being written is finished first."""
        if self.background is not None:
            self.background.close()

    @property
    def _step(self) -> int:
        return self.content.training.state.step

    def _request(self) -> SaveRequest:
        """Collective: a request to save the current step."""
        self.asked = self._step
        self.inside[self.asked] = self.content.health.band.left is None
        return self.content.request(self.checkpoints.keep, self.checkpoints.world)

    def _write(self, request: SaveRequest) -> None:
        checkpoints, fence = self.checkpoints, self.checkpoints.fence
        assert fence is not None, "a run owns its store before it trains"
        since = time.monotonic()
        try:
            with self.content.pieces() as state:
                write(checkpoints.store, draft_of(state, checkpoints.store), request, checkpoints.world, fence.may_write)
        except CheckpointError:
            fence.check()  # a newer job may be the cause
            raise
        self._saved(request.step, time.monotonic() - since)

    def _ended(self, outcome: SaveResult) -> None:
        if outcome.error is None:
            self._saved(outcome.step, outcome.seconds)
            return
        assert self.checkpoints.fence is not None, "a run owns its store before it trains"
        self.checkpoints.fence.check()
        self._failed(outcome.step, outcome.error)

    def _failed(self, step: int, error: str) -> None:
        self.inside.pop(step, None)
        self.content.health.warn(f"{error}. Training goes on and saves again when the next checkpoint is due")

    def _saved(self, step: int, seconds: float) -> None:
        self.grace.took(seconds)
        if self.durable < 0:
            self._first()
        self.durable = step
        self.content.health.saved(step, self.inside.pop(step, False))

    def _first(self) -> None:
        """After the first save that is durable."""
        if self.content.decided.topology.rank == 0:
            forget(self.content.decided.directory)
        if warning := self.grace.too_short():
            self.content.health.warn(warning)


END = "SLURM_JOB_END_TIME"
"""Environment variable with the time at which SLURM ends the job, in seconds since 1970."""

NEWEST = 5
"""Number of recent saves whose median duration is the estimate for the next one."""


class Grace:
    """The time that one process has left to save.

    Args:
        seconds: seconds between a stop signal and the end of this process; None if unknown.
        environment: may have the time at which SLURM ends the job. A time in the past, as when clocks differ, is ignored.
        since: returns the seconds since the first signal; 0 without one.
        clock: returns the seconds since 1970.
    """

    def __init__(
        self,
        seconds: float | None,
        environment: Mapping[str, str],
        since: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.seconds, self.since, self.clock = seconds, since, clock
        end = environment.get(END, "")
        self.end = int(end) if end.isdigit() else None
        self._took: deque[float] = deque(maxlen=NEWEST)

    def took(self, seconds: float) -> None:
        """Records the duration of a save, from its begin until it was durable."""
        self._took.append(seconds)

    @property
    def needed(self) -> float:
        """Estimated seconds of a save; 0 before the first measurement."""
        return median(self._took) if self._took else 0.0

    def left(self) -> float:
        """Returns the seconds until this process is killed; infinite if unknown."""
        left = math.inf if self.seconds is None else self.seconds - self.since()
        until = math.inf if self.end is None else self.end - self.clock()
        return min(left, until if until > 0 else math.inf)

    def lacks(self) -> float:
        """Returns the seconds by which the time left is too short for a save; 0 if it is enough."""
        return max(0.0, self.needed - self.left())

    def too_short(self) -> str:
        """Returns a warning if no save fits into the grace period; empty if one fits or the period is unknown."""
        if self.seconds is None or self.needed <= self.seconds:
            return ""
        return (
            f"a save takes {self.needed:.3g} s, but checkpoint.grace leaves {self.seconds:.3g} s after a signal: the run will "
            "stop without saving. Request more time from the scheduler (sbatch --signal=USR1@SECONDS) and raise "
            "checkpoint.grace, or save more often"
        )
