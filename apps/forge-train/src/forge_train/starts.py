"""The record of a run's starts: rank 0 appends a line to `starts.jsonl` at each start, and one at each end that it lives to see.

    {"start": MARK, "time": ..., "began": ..., "step": 40, "max_steps": 100, "metrics": 8123, "rollback": false,
     "host": "node7", "boot": "...", "pid": 4711, "process": "8812345"}
    {"end": MARK, "time": ..., "step": 100, "code": 0, "status": "finished", "pauses": {"save": 1.25}}

`MARK` is the job's mark in the checkpoint store (`forge_ckpt.checkpoint.fence`), so a start without an end is either still
running, or crashed, or another job has taken its store. `metrics` is the size of `metrics.jsonl` at the start: the lines of each
start can be found without reading those of the others. Times are ISO times in UTC.
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any

from forge_core.errors import ForgeError, Superseded
from forge_core.redaction import redacted_text
from forge_train.directory import STARTS
from forge_train.process.identity import ProcessIdentity
from forge_train.process.stop import REQUEUE, STOPPED
from forge_train.trackers import METRICS

if TYPE_CHECKING:
    from forge_train.run.run import Run

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunEnd:
    """How a start of a run ended.

    Attributes:
        time: seconds since 1970.
        step: completed optimizer steps.
        code: exit code; None if the run goes on in the same process after a rollback.
        status: why it ended.
        pauses: seconds that training waited for each hook, by name.
    """

    time: float
    step: int
    code: int | None
    status: str
    pauses: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RunStart:
    """A start of a run.

    Attributes:
        mark: mark of the job in its checkpoint store.
        time: when it took the run's directory over, in seconds since 1970.
        began: when its process began; None if unknown.
        step: step from which it goes on.
        max_steps: last step of the run.
        metrics: size of `metrics.jsonl` before this start, in bytes.
        rollback: whether it goes back within the process of the start before.
        process: process of rank 0.
        end: how it ended; None if that was not recorded.
    """

    mark: str
    time: float
    began: float | None
    step: int
    max_steps: int
    metrics: int
    rollback: bool
    process: ProcessIdentity
    end: RunEnd | None = None


def record_start(run: "Run", rollback: bool) -> None:
    """Records that this job has taken the directory of a run over; rank 0 only.

    Raises:
        OSError: the record cannot be written.
    """
    process, fence, metrics = ProcessIdentity.of_this(), run.stop.fence, run.directory / METRICS
    assert fence is not None, "a run owns its store before it records its start"
    began = process.began_at()
    line = {
        "start": fence.mark,
        "time": _iso(time()),
        "began": None if began is None else _iso(began),
        "step": run.state.step,
        "max_steps": run.job.train.max_steps,
        "metrics": metrics.stat().st_size if metrics.exists() else 0,
        "rollback": rollback,
        "host": process.host,
        "boot": process.boot,
        "pid": process.pid,
        "process": process.began,
    }
    _append(run.directory / STARTS, line)


@dataclass
class Ending:
    """Why a start ended; empty until it did, and after a rollback."""

    reason: str = ""


@contextmanager
def recorded_end(run: "Run") -> Iterator[Ending]:
    """Records on rank 0 how the `with` block ended: the block sets the reason, an exception is one, and neither is a rollback.

    Nothing is recorded if another job has taken the run over. A record that cannot be written does not end the run.
    """
    ending = Ending()
    try:
        yield ending
    except Superseded:
        raise
    except BaseException as error:
        _record_end(run, _code_of(error), str(error) or type(error).__name__)
        raise
    if ending.reason:
        _record_end(run, REQUEUE if ending.reason == STOPPED else run.calls.exit_code, ending.reason)
    else:
        _record_end(run, None, "rolled back")


def _record_end(run: "Run", code: int | None, status: str) -> None:
    fence = run.stop.fence
    if run.topology.rank != 0 or fence is None or run.stop.superseded():
        return
    line = {
        "end": fence.mark,
        "time": _iso(time()),
        "step": run.state.step,
        "code": code,
        "status": redacted_text(status.partition("\n")[0]),
        "pauses": {name: round(seconds, 3) for name, seconds in run.clock.pauses.items()},
    }
    try:
        _append(run.directory / STARTS, line)
    except OSError as cause:
        _log.warning("the end of this start cannot be recorded in %s: %s", STARTS, cause.strerror)


def _code_of(error: BaseException) -> int:
    """Returns the exit code with which a process ends after an error."""
    from forge_parallel.launch.watch import PeerFailure, is_broken_connection

    if is_broken_connection(error):
        return PeerFailure.exit_code
    code = getattr(error, "exit_code", None) if isinstance(error, (ForgeError, KeyboardInterrupt)) else None
    return code if isinstance(code, int) else 1


def _append(path: Path, entry: Mapping[str, Any]) -> None:
    """Appends a line by a single write; after a line that was cut off, it starts a new one."""
    line = json.dumps(entry, allow_nan=False).encode() + b"\n"
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(handle).st_size
        torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        os.write(handle, b"\n" + line if torn else line)
    finally:
        os.close(handle)


def read_starts(path: Path) -> tuple[list[RunStart], int]:
    """Returns the starts of a run, oldest first, and the number of incomplete or damaged lines; no starts without a file."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    starts: dict[str, RunStart] = {}
    unread = 0
    for line in filter(bytes.strip, content.split(b"\n")):
        try:
            entry = json.loads(line)
            if "start" in entry:
                starts[entry["start"]] = _start_of(entry)
            elif entry["end"] in starts:  # the line of the start may be damaged
                starts[entry["end"]] = replace(starts[entry["end"]], end=_end_of(entry))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            unread += 1
    return list(starts.values()), unread


def _start_of(entry: Mapping[str, Any]) -> RunStart:
    began = entry["began"]
    return RunStart(
        mark=entry["start"],
        time=_epoch(entry["time"]),
        began=None if began is None else _epoch(began),
        step=int(entry["step"]),
        max_steps=int(entry["max_steps"]),
        metrics=int(entry["metrics"]),
        rollback=bool(entry["rollback"]),
        process=ProcessIdentity(str(entry["host"]), str(entry["boot"]), int(entry["pid"]), str(entry["process"])),
    )


def _end_of(entry: Mapping[str, Any]) -> RunEnd:
    code = entry["code"]
    pauses = {str(name): float(seconds) for name, seconds in entry["pauses"].items()}
    return RunEnd(_epoch(entry["time"]), int(entry["step"]), None if code is None else int(code), str(entry["status"]), pauses)


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _epoch(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
