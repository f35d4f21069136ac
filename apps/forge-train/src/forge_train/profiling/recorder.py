"""The profiler of one rank over one window of steps, and the files that it writes."""

import gzip
import json
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, record_function

from forge_core.files import publish, sync_path
from forge_parallel.accelerator import note_allocations, notes_allocations, profiled, wait, write_allocations
from forge_train.profiling.classes import CLOSING
from forge_train.profiling.trace import ABOUT, WINDOW, snapshot_of, trace_of

ALLOCATIONS = 200_000
"""Maximum number of allocator events in a snapshot; older events are dropped."""

_log = logging.getLogger(__name__)


class Recorder:
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
