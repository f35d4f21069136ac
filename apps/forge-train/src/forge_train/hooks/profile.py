"""Profiles windows of steps: at steps of the recipe, or when a signal asks for it."""

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
"""Events of the allocator that a snapshot holds, the last ones."""

_log = logging.getLogger(__name__)


class ProfileHook(Hook):
    """Records all ranks, or some, over the same steps, and writes a trace for each: `profiles/step-N/rank-K.json.gz`.

    A window reaches from before its first step to before the step after its last, so it has the data and the hooks of as many
    steps. On an accelerator the host waits for the device at both ends, nowhere else. A signal on any rank opens a window on all,
    after the step whose numbers have carried the wish. What fails here, such as a full disk, costs a warning and never the run.

    Rank 0 logs `profile/CLASS`, the share of the window in each class of `forge_train.profiling.classes`, `profile/step_seconds`,
    and `split/PART`, seconds of a step for each of its parts; exposed communication and the host have parts of their own.
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
            _log.warning(
                "hooks.profile.memory: the allocator of this device keeps no record; traces are written without snapshots"
            )
        if self.signal is None:
            return
        if threading.current_thread() is not threading.main_thread():
            _log.warning("hooks.profile.signal: %s is not heard, since the run is not in the main thread", self.signal)
            return
        self._before = signal.signal(getattr(signal, self.signal), self._ask)
        _log.info("profile some steps of all ranks with: kill -%s %d", self.signal.removeprefix("SIG"), os.getpid())

    def before_step(self, run: Run) -> None:
        """Ends a window that is over, opens one that is due, and goes on with one that is open."""
        coming = run.state.step + 1
        if self.first is not None and coming >= self.first + self.steps:
            self._close(run)
        if self.first is None and (first := self._due(run, coming)) is not None:
            self._open(run, first, coming)
        elif self.first is not None:
            self._advance(run, coming)
        run.requests.trace, self._asked = self._asked, False

    def finish(self, run: Run) -> None:
        """Ends an open window with the steps that it has, and gives the signal back."""
        if self.first is not None:
            self._close(run)
        if self._before is not None and self.signal is not None:
            signal.signal(getattr(signal, self.signal), self._before)
            self._before = None

    def leave(self, run: Run) -> None:
        """Drops an open window, and gives the signal back."""
        if self.recorder is not None:
            self.recorder.abandon()
        self.first = self.recorder = None
        self.finish(run)

    def _ask(self, *_: Any) -> None:
        self._asked = True

    def _due(self, run: Run, coming: int) -> int | None:
        """The first step of a window that has to begin to warm up now; the same on all ranks."""
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
            run.judge()  # on all ranks; what was queued before belongs to the steps before
            if run.topology.rank == 0:  # an earlier start may have left traces of other ranks; all write later than this step
                shutil.rmtree(folder_of(run.directory, self.first), ignore_errors=True)
            if self.recorder is not None:
                self._try(self.recorder.begin)

    def _close(self, run: Run) -> None:
        """Collective: ends the window on all ranks, those that do not record too."""
        assert self.first is not None
        first, done = self.first, run.state.step - self.first + 1
        recorder, self.first, self.recorder = self.recorder, None, None
        run.watch.enter("writing a profile")
        run.judge()  # the device has caught up, so the pause is one
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
        """A failure ends this window only."""
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
        """Begins to warm up, or to record without any."""
        self.profiler.start()

    def step(self) -> None:
        """One step is over."""
        self.profiler.step()

    def begin(self) -> None:
        """The window begins."""
        self.recording = True
        wait(self.device)
        if self.memory:
            note_allocations(self.device, ALLOCATIONS)
        self.ranges.enter_context(record_function(WINDOW))

    def stop(self, about: dict[str, Any], folder: Path) -> None:
        """The window ends; writes it.

        Raises:
            OSError: it cannot be written.
        """
        if not self.recording:  # the run has ended while it warmed up
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
        """Compressed in large pieces; torch does it line by line, which takes ten times as long."""
        plain = f"{path}.json"
        try:
            self.profiler.export_chrome_trace(plain)
            with Path(plain).open("rb") as source, gzip.open(path, "wb", compresslevel=3) as target:
                shutil.copyfileobj(source, target, 1 << 20)
        finally:
            Path(plain).unlink(missing_ok=True)

    def abandon(self) -> None:
        """Ends everything without a trace; what cannot be ended has not begun."""
        for action in (self.ranges.close, self.profiler.stop, *([lambda: note_allocations(self.device, None)] * self.memory)):
            try:
                action()
            except Exception as cause:  # noqa: BLE001 (as above)
                _log.info("profile: %s: %s", type(cause).__name__, cause)


def _write(path: Path, make: Callable[[str], object]) -> None:
    """A file that appears whole or not at all; `make` writes it to the name that it is given."""
    partial = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        make(str(partial))
        sync_path(partial)
        publish(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
