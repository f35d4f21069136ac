"""Hook `profile`: profiles windows of steps, at steps of the recipe or on a signal."""

import gzip
import json
import logging
import os
import shutil
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
from torch.profiler import ProfilerAction, record_function

from forge_core.durable_files import publish, sync_path
from forge_core.protocols.run import Hook, Run
from forge_core.terminal import size
from forge_parallel.accelerator import note_allocations, notes_allocations, profiled, wait, write_allocations
from forge_parallel.launch.environment import read_launcher
from forge_train.hooks.periodic import pause
from forge_train.profiling.classes import CLOSING
from forge_train.profiling.summary import summarize
from forge_train.profiling.trace import ABOUT, WINDOW, folder_of, forget_old, read_trace, snapshot_of, trace_of

ALLOCATIONS = 200_000
"""Maximum number of allocator events in a snapshot; older events are dropped."""

_log = logging.getLogger(__name__)


class ProfileHook(Hook):
    """Profiles all or some ranks over the same steps, and writes a trace per rank: `profiles/step-N/rank-K.json.gz`.

    A window lasts from before its first step to after the hooks of its last step. On an accelerator, the host waits for the
    device only at both ends. A signal on any rank opens a window on all ranks, after the request has reached them with the
    numbers of a step. A failure, such as a full disk, is a warning and does not end the run.

    Rank 0 logs `profile/CLASS`, the share of the window in each class of `forge_train.profiling.classes`, `profile/step_seconds`,
    and `split/PART`, the seconds per step of each part, including exposed communication and the host.
    """

    observes = True

    def __init__(
        self,
        at: Sequence[int] = (),
        every: int = 0,
        steps: int = 3,
        warmup: int = 1,
        signal: str | None = None,
        ranks: list[int] | Literal["all", "nodes"] = "all",
        memory: bool = False,
        stacks: bool = False,
        shapes: bool = False,
        keep: int = 5,
    ) -> None:
        self.at, self.every, self.steps, self.warmup = sorted(at), every, steps, warmup
        self.signal, self.ranks, self.memory = signal, ranks, memory
        self.stacks, self.shapes, self.keep = stacks, shapes, keep
        self.first: int | None = None
        self.recorder: _Recorder | None = None
        self._asked = False
        self._seen = 0
        self._before: Any = None

    def start(self, run: Run) -> None:
        """Listens for the signal."""
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

    def _start(self, device: torch.device, warmup: int) -> None:
        self.recorder = _Recorder(device, warmup, memory=self.memory, stacks=self.stacks, shapes=self.shapes)
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
        if isinstance(self.ranks, list):
            return run.topology.rank in self.ranks
        return self.ranks == "all" or read_launcher(os.environ).local_rank == 0

    def _try(self, action: Callable[[], None], recorder: "_Recorder | None" = None) -> None:
        """Runs an action; a failure ends only this window."""
        try:
            action()
        except Exception as cause:  # noqa: BLE001 - no error of a profiler, a library or a disk may stop training
            _log.warning("profile failed (%s: %s); the run goes on without it", type(cause).__name__, cause)
            failed, self.recorder = recorder or self.recorder, None
            if failed is not None:
                failed.abandon()


class _Recorder:
    """The profiler of one rank over one window."""

    def __init__(self, device: torch.device, warmup: int, *, memory: bool, stacks: bool, shapes: bool) -> None:
        self.device = device
        self.memory = memory and notes_allocations(device)
        self.ranges = ExitStack()
        self.recording = False
        self.profiler = torch.profiler.profile(
            activities=profiled(device),
            schedule=lambda step: ProfilerAction.WARMUP if step < warmup else ProfilerAction.RECORD,
            with_stack=stacks,
            record_shapes=shapes,
        )

    def start(self) -> None:
        """Starts the profiler with its warm-up, or with the window if there is no warm-up."""
        self.profiler.start()

    def step(self) -> None:
        """Advances the profiler to the next step."""
        self.profiler.step()

    def begin(self) -> None:
        """Begins the window."""
        self.recording = True
        wait(self.device)
        if self.memory:
            note_allocations(self.device, ALLOCATIONS)
        self.ranges.enter_context(record_function(WINDOW))

    def stop(self, about: dict[str, Any], folder: Path) -> None:
        """Ends the window and writes its trace.

        Raises:
            OSError: the trace cannot be written.
        """
        if not self.recording:  # the run ended during the warm-up
            self.abandon()
            return
        with record_function(CLOSING):
            wait(self.device)
        self.ranges.close()
        self.profiler.add_metadata_json(ABOUT, json.dumps(about))
        self.profiler.stop()
        folder.mkdir(parents=True, exist_ok=True)
        _write(trace_of(folder, about["rank"]), self._export)
        if self.memory:
            _write(snapshot_of(folder, about["rank"]), lambda path: write_allocations(self.device, path))
            note_allocations(self.device, None)

    def _export(self, path: str) -> None:
        """Writes the trace compressed in large pieces; torch compresses line by line, which takes ten times as long."""
        plain = f"{path}.json"
        try:
            self.profiler.export_chrome_trace(plain)
            with Path(plain).open("rb") as source, gzip.open(path, "wb", compresslevel=3) as target:
                shutil.copyfileobj(source, target, 1 << 20)
        finally:
            Path(plain).unlink(missing_ok=True)

    def abandon(self) -> None:
        """Stops profiling without a trace; errors are only logged, since some parts may not have started."""
        for action in (self.ranges.close, self.profiler.stop, *([lambda: note_allocations(self.device, None)] * self.memory)):
            try:
                action()
            except Exception as cause:  # noqa: BLE001 (as above)
                _log.info("profile: %s: %s", type(cause).__name__, cause)


def _write(path: Path, make: Callable[[str], object]) -> None:
    """Creates a file atomically; `make` writes it to a temporary name."""
    partial = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        make(str(partial))
        sync_path(partial)
        publish(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
