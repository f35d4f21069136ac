"""Hook `profile`: profiles windows of steps, at steps of the recipe or on a signal.

Methods import torch, so that importing this module does not.
"""

import logging
import os
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt

from forge_core.component import FREE
from forge_core.protocols.run import Hook, Run
from forge_core.terminal import size
from forge_train.hooks.periodic import pause
from forge_train.profiling.trace import folder_of, forget_old, read_trace, trace_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from forge_train.profiling.recorder import Recorder

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Profile(Hook):
    """Profiles some steps on every rank with torch.profiler; `forge-train profile RUN` shows where their time went.

    All ranks profile the same steps. Each rank writes a trace, `profiles/step-N/rank-K.json.gz`.

    A window lasts from before its first step to after the hooks of its last step. On an accelerator, the host waits for the
    device only at both ends. A signal on any rank opens a window on all ranks, after the request has reached them with the
    numbers of a step. A failure, such as a full disk, is a warning and does not end the run.

    Rank 0 logs `profile/CLASS`, the share of the window in each class of `forge_train.profiling.classes`, `profile/step_seconds`,
    and `split/PART`, the seconds per step of each part, including exposed communication and the host.
    """

    key_class: ClassVar = FREE
    observes = True

    at: list[Annotated[int, Gt(0)]] = field(default_factory=list)
    """First steps of windows; the first step of the run is 1."""
    every: Annotated[int, Ge(0)] = 0
    """A window begins at each multiple of this step; 0 for none."""
    steps: Annotated[int, Gt(0)] = 3
    """Steps per window."""
    warmup: Annotated[int, Ge(0)] = 1
    """Steps before a window in which the profiler runs without recording, because its start takes time."""
    signal: Literal["SIGUSR1", "SIGUSR2"] | None = None
    """Signal that opens a window on all ranks if any process of the run receives it; it no longer ends the run. Do not send
    SIGUSR1 to torchrun, which it ends."""
    ranks: Literal["all", "nodes"] | list[Annotated[int, Ge(0)]] = "all"
    """Ranks that write a trace: all ranks, the first rank of each node, or the ranks in a list."""
    memory: bool = False
    """Also write the history of the device's allocator, for pytorch.org/memory_viz; a warning if the device has none."""
    stacks: bool = False
    """Also record Python stacks, which makes traces large and steps slow."""
    shapes: bool = False
    """Also record the shapes of operators' inputs."""
    keep: Annotated[int, Gt(0)] = 5
    """Number of newest windows to keep."""

    @classmethod
    def examples(cls, folder: Path) -> "Iterable[Profile]":
        return (cls(at=[2], steps=2),)

    def __post_init__(self) -> None:
        self.first: int | None = None
        self.recorder: Recorder | None = None
        self._asked = False
        self._seen = 0
        self._before: Any = None

    def start(self, run: Run) -> None:
        """Listens for the signal."""
        from forge_parallel.accelerator import notes_allocations

        if self.memory and not notes_allocations(run.topology.device) and run.topology.rank == 0:
            _log.warning("hooks.profile.memory: the allocator of this device records no history; traces have no memory snapshots")
        if self.signal is None:
            return
        if threading.current_thread() is not threading.main_thread():
            _log.warning("hooks.profile.signal: %s has no effect, since the run is not in the main thread", self.signal)
            return
        self._before = signal.signal(getattr(signal, self.signal), self._ask)
        _log.info("profile some steps of all ranks with: kill -%s %d", self.signal.removeprefix("SIG"), os.getpid())

    def before_step(self, run: Run) -> None:
        """Closes a window that is over, opens a window that is due, and advances an open window."""
        coming = run.state.step + 1
        if self.first is not None and coming >= self.first + self.steps:
            self._close(run)
        if self.first is None and (first := self._due(run, coming)) is not None:
            self._open(run, first, coming)
        elif self.first is not None:
            self._advance(run, coming)
        run.requests.trace, self._asked = self._asked, False

    def finish(self, run: Run) -> None:
        """Closes an open window early, and restores the signal's handler."""
        if self.first is not None:
            self._close(run)
        if self._before is not None and self.signal is not None:
            signal.signal(getattr(signal, self.signal), self._before)
            self._before = None

    def leave(self, run: Run) -> None:
        """Drops an open window, and restores the signal's handler."""
        if self.recorder is not None:
            self.recorder.abandon()
        self.first = self.recorder = None
        self.finish(run)

    def _ask(self, *_: Any) -> None:
        self._asked = True

    def _due(self, run: Run, coming: int) -> int | None:
        """Returns the first step of a window whose warm-up begins now, or None; equal on all ranks."""
        if run.requests.trace_step > self._seen:
            self._seen = run.requests.trace_step
            return coming + self.warmup
        soon = [step for step in self.at if step >= coming]
        if self.every:
            soon.append(-(-coming // self.every) * self.every)
        first = min(soon, default=None)
        return first if first is not None and coming >= first - self.warmup else None

    def _open(self, run: Run, first: int, coming: int) -> None:
        self.first = first
        if self._records(run):
            self._try(lambda: self._start(run.topology.device, first - coming))
        self._advance(run, coming, opened=True)

    def _start(self, device: "torch.device", warmup: int) -> None:
        from forge_train.profiling.recorder import Recorder

        self.recorder = Recorder(device, warmup, memory=self.memory, stacks=self.stacks, shapes=self.shapes)
        self.recorder.start()

    def _advance(self, run: Run, coming: int, opened: bool = False) -> None:
        assert self.first is not None
        if self.recorder is not None and not opened:
            self._try(self.recorder.step)
        if coming == self.first:
            run.judge()  # collective; queued work belongs to the steps before
            if run.topology.rank == 0:  # removes traces of an earlier start; all ranks write later than this step
                shutil.rmtree(folder_of(run.directory, self.first), ignore_errors=True)
            if self.recorder is not None:
                self._try(self.recorder.begin)

    def _close(self, run: Run) -> None:
        """Collective: closes the window on all ranks, including those that do not record."""
        assert self.first is not None
        first, done = self.first, run.state.step - self.first + 1
        recorder, self.first, self.recorder = self.recorder, None, None
        run.watch.enter("writing a profile")
        run.judge()  # waits for the device, so that the pause is measured correctly
        if recorder is None:
            return
        with pause(run):
            place = {"rank": run.topology.rank, "world": run.topology.size, "device": run.topology.device.type}
            about = {**place, "step": first, "steps": done}
            self._try(lambda: recorder.stop(about, folder_of(run.directory, first)), recorder)
            if run.topology.rank == 0:
                self._try(lambda: self._tell(run, first, done))

    def _tell(self, run: Run, first: int, done: int) -> None:
        """On rank 0: the shares to the trackers, a line for people, and older windows away."""
        from forge_train.profiling.summary import summarize

        path = trace_of(folder_of(run.directory, first), run.topology.rank)
        if not path.is_file():
            return
        found = summarize(read_trace(path))
        shares = {f"profile/{label}": time / found.window for label, time in found.classes.items()}
        parts = {f"split/{part}": time / done / 1e9 for part, time in found.split.items()}
        run.log({**shares, **parts, "profile/step_seconds": found.window / done / 1e9})
        if run.console is not None:
            run.console.print(
                f"profiled steps {first} to {first + done - 1}: {path.parent}, {size(path.stat().st_size)} a rank; "
                f"forge-train profile {run.directory} reads it",
                highlight=False,
                soft_wrap=True,
            )
        forget_old(run.directory, self.keep)

    def _records(self, run: Run) -> bool:
        from forge_parallel.launch.environment import read_launcher

        if isinstance(self.ranks, list):
            return run.topology.rank in self.ranks
        return self.ranks == "all" or read_launcher(os.environ).local_rank == 0

    def _try(self, action: Callable[[], None], recorder: "Recorder | None" = None) -> None:
        """Runs an action; a failure ends only this window."""
        try:
            action()
        except Exception as cause:  # noqa: BLE001 - no error of a profiler, a library or a disk may stop training
            _log.warning("profile failed (%s: %s); the run goes on without it", type(cause).__name__, cause)
            failed, self.recorder = recorder or self.recorder, None
            if failed is not None:
                failed.abandon()
