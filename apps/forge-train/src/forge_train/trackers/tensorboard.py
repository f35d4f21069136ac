"""Scalars as TensorBoard event files, in `tensorboard/` of the run's directory.

A resume after step s starts a new file whose first event says that the run starts again at s + 1: TensorBoard then leaves
out what earlier files hold from that step on (its "purge step"). One event holds all values of a write, as 32-bit floats.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_train.trackers.guarded import library


class TensorBoardTracker:
    """Writes with TensorBoard's own writer; a thread of it flushes every `flush_seconds`.

    Raises:
        ForgeError: tensorboard is not installed.
    """

    def __init__(self, directory: Path, flush_seconds: float = 30.0) -> None:
        self.directory = directory
        self.flush_seconds = flush_seconds
        self._events = library("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summaries = library("tensorboard.compat.proto.summary_pb2", "tensorboard")
        self._files = library("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._open: Any = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds one event with the values of optimizer step `step`."""
        scalar = self._summaries.Summary.Value
        summary = self._summaries.Summary(value=[scalar(tag=name, simple_value=value) for name, value in values.items()])
        self._writer().add_event(self._events.Event(wall_time=time.time(), step=step, summary=summary))

    def rewind(self, step: int) -> None:
        """Voids what earlier starts wrote after `step`; a run without earlier files has nothing to void."""
        if any(self.directory.glob("events.out.tfevents.*")):
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._writer().add_event(self._events.Event(wall_time=time.time(), step=step + 1, session_log=start))

    def close(self) -> None:
        """Flushes and ends the file."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _writer(self) -> Any:
        if self._open is None:
            self._open = self._files.EventFileWriter(str(self.directory), flush_secs=self.flush_seconds)
        return self._open
