"""When and how a run's checkpoints are written: while training waits, or in the background. A save that fails does not end a run:
the next one tries again, and only the last one must succeed, unless the run was asked to stop and the time does not suffice."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from forge_ckpt.background import BackgroundSaves, SaveResult
from forge_ckpt.checkpoint.save import check_room, draft_of
from forge_ckpt.checkpoint.write import SaveRequest, write
from forge_ckpt.errors import Superseded
from forge_ckpt.world import ProcessGroupWorld
from forge_core.errors import CheckpointError
from forge_train.process.grace import Grace
from forge_train.recipe.schema import Job
from forge_train.run.checkpoints import Checkpoints
from forge_train.run.run import Run


@dataclass
class Saves:
    """The saves of one start of a run.

    Attributes:
        background: writes them while training goes on; None where training waits.
        grace: how much time there is for the last one, if a signal asks for it.
        first: called when the first one is durable.
        asked: the newest step that was to be saved; -1 while there was none.
        durable: the newest step that is.
        inside: steps that were to be saved and have not ended, and whether the loss was in its band there.
    """

    checkpoints: Checkpoints
    background: BackgroundSaves | None = None
    grace: Grace = field(default_factory=lambda: Grace(None, {}))
    first: Callable[[], object] = lambda: None
    asked: int = -1
    durable: int = -1
    inside: dict[int, bool] = field(default_factory=dict)

    def save(self, run: Run) -> None:
        """Collective: writes a checkpoint of the current step, or begins to. One that cannot be written is a warning, the same on
        all ranks.

        Raises:
            TrainingError: a parameter or the optimizer's state is not finite, or too many steps were skipped; nothing was
                written.
            Superseded: another job has started in the run's directory; nothing was written.
        """
        run.judge()  # what is kept of the run's health includes this step
        self.checkpoints.check(run)
        self.settle(run)
        order = self._asked(run)
        if self.background is None:
            try:
                self._write(run, order)
            except Superseded:
                raise
            except CheckpointError as cause:
                self._failed(run, order.step, str(cause))
            return
        with self.checkpoints.state_of(run) as state:
            begun = self.background.save(state, order)
        if not begun:
            del self.inside[order.step]
            run.health.warn(
                f"step {order.step} was not saved, because the save before it is still being written. Save less often "
                "(checkpoint.every), or let training wait for it (checkpoint.busy = 'wait')"
            )

    def settle(self, run: Run, wait: bool = False) -> None:
        """Collective: takes note of saves that have ended in the background; with `wait`, of all that were begun.

        Raises:
            Superseded: one of them failed, because another job has started in the run's directory.
        """
        for outcome in self.background.settled(wait) if self.background is not None else ():
            self._ended(run, outcome)

    def may_begin(self, run: Run) -> bool:
        """Collective: whether a run that was asked to stop has the time to save; where some rank has not, all say so.

        A save that is under way in the background is not asked about: it is finished.
        """
        replies = self.checkpoints.world.all_gather(f"{self.grace.lacks()} {self.grace.needed} {self.grace.left()}".encode())
        lacks, needed, left = max(tuple(map(float, reply.split())) for reply in replies)
        if not lacks:
            return True
        run.left_out = True
        run.health.warn(
            f"step {run.state.step} is not saved: a save takes {needed:.3g} s, and {max(left, 0):.3g} s are left until the "
            "scheduler ends this job. Started again, the run goes on from its newest checkpoint"
        )
        return False

    def finish(self, run: Run) -> None:
        """Collective: returns when the newest step that was to be saved is durable.

        Raises:
            CheckpointError: it cannot be written.
            Superseded: another job has started in the run's directory.
        """
        self.settle(run, wait=True)
        if self.asked == run.state.step and self.durable != self.asked:  # it failed, or was left out
            self._write(run, self._asked(run))

    def close(self) -> None:
        """Ends what writes in the background; what is being written is finished first."""
        if self.background is not None:
            self.background.close()

    def _asked(self, run: Run) -> SaveRequest:
        """Collective: what is to be saved now."""
        self.asked = run.state.step
        self.inside[self.asked] = run.health.band.left is None
        return self.checkpoints.order(run)

    def _write(self, run: Run, order: SaveRequest) -> None:
        fence = self.checkpoints.fence
        assert fence is not None, "a run owns its store before it trains"
        since = time.monotonic()
        try:
            with self.checkpoints.state_of(run) as state:
                write(
                    self.checkpoints.store,
                    draft_of(state, self.checkpoints.store),
                    order,
                    self.checkpoints.world,
                    fence.may_write,
                )
        except CheckpointError:
            fence.check()  # a newer job may be why
            raise
        self._saved(run, order.step, time.monotonic() - since)

    def _ended(self, run: Run, outcome: SaveResult) -> None:
        if outcome.error is None:
            self._saved(run, outcome.step, outcome.seconds)
            return
        assert self.checkpoints.fence is not None, "a run owns its store before it trains"
        self.checkpoints.fence.check()
        self._failed(run, outcome.step, outcome.error)

    def _failed(self, run: Run, step: int, error: str) -> None:
        self.inside.pop(step, None)
        run.health.warn(f"{error}. Training goes on and saves again when the next checkpoint is due")

    def _saved(self, run: Run, step: int, seconds: float) -> None:
        self.grace.took(seconds)
        if self.durable < 0:
            self._first(run)
        self.durable = step
        run.health.saved(step, self.inside.pop(step, False))

    def _first(self, run: Run) -> None:
        if run.topology.rank == 0:
            self.first()
        if short := self.grace.too_short():
            run.health.warn(short)


def saves_of(job: Job, checkpoints: Checkpoints, run: Run) -> Saves:
    """Collective: the saves of a run. What they need on the disk is compared with what is left; what in memory, is taken now.

    Raises:
        CheckpointError: on every rank, when not even one checkpoint has room, or a host has too little memory for copies of its
            ranks' state.
    """
    with checkpoints.state_of(run) as state:
        missing = check_room(checkpoints.store, state, checkpoints.world, job.checkpoint.most_kept(job.train.max_steps))
    if missing:
        run.health.warn(missing)
    grace = Grace(job.checkpoint.grace, os.environ, since=lambda: run.stop.signals.since)
    if job.checkpoint.mode == "sync":
        return Saves(checkpoints, grace=grace)
    world = checkpoints.world
    apart = ProcessGroupWorld.apart() if world.size > 1 else world
    background = BackgroundSaves(checkpoints.store, world, apart, by=job.checkpoint.saver, busy=job.checkpoint.busy)
    with checkpoints.state_of(run) as state:
        background.reserve(state)
    return Saves(checkpoints, background, grace)
