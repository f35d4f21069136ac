"""Reads the state of a run from its directory: what it is doing, how far it has come, and how well it used its time.

A state needs evidence. A start that has recorded its end has the state of its exit code. A start that has not is running if its
process is alive; on another host, or in another container, if its newest line is not too old. Otherwise it crashed.
"""

import json
import math
import os
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from forge_core.errors import DataError
from forge_core.terminal import duration
from forge_train.directory import CHECKPOINTS, RECIPE, STARTS, previous
from forge_train.process.stop import REQUEUE, STOPPED
from forge_train.report.record import SUMMARY
from forge_train.runs.goodput import Goodput, goodput
from forge_train.runs.segment import MetricsLine, MetricsSegment, line_of
from forge_train.starts import RunStart, read_starts
from forge_train.trackers import METRICS, metric_value

STATES = ("running", "finished", "preempted", "failed", "superseded", "unknown")
"""States of runs: `preempted` ended on a signal and can be resumed; `superseded` lost its checkpoints to another job."""

SILENT_SECONDS = 600.0
"""Minimum age of the newest line after which a run of another host counts as crashed."""
SILENT_LINES = 10.0
"""The same, in times between two lines."""

DEEPEST = 5
"""Maximum number of folders between the given one and a run."""

_MARKS = frozenset((STARTS, METRICS, SUMMARY))
_DAMAGED = 20
_LINES_OF_VALUES = 200
_LOOKED_BACK = 5
_CODES = {0: "finished", 9: "finished", 4: "superseded", REQUEUE: "preempted"}


@dataclass
class RunOverview:
    """One row of the list of runs; None is unknown.

    Attributes:
        state: one of `STATES`.
        why: evidence of the state.
        step: newest step with a line, or at the recorded end.
        loss, lr: of the newest line of hook `log` that a restart has not made void.
        seconds_left: until `max_steps`, at the pace of the newest lines; only of a running run.
        newest: time of the newest record, in seconds since 1970.
        restarts: starts of processes but the first.
        rollbacks: returns to a checkpoint within a process.
        goodput: how the wall time was spent.
        notes: what could not be read.
    """

    directory: Path
    state: str = "unknown"
    why: str = ""
    step: int | None = None
    max_steps: int | None = None
    loss: float | None = None
    lr: float | None = None
    seconds_left: float | None = None
    newest: float | None = None
    restarts: int | None = None
    rollbacks: int | None = None
    goodput: Goodput | None = None
    process: str | None = None
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Returns the row for programs; times are seconds. A loss or rate that is not finite is text, such as "nan"."""
        spent = self.goodput
        return {
            "run": str(self.directory),
            "state": self.state,
            "why": self.why,
            "step": self.step,
            "max_steps": self.max_steps,
            "loss": _plain(self.loss),
            "lr": _plain(self.lr),
            "seconds_left": _plain(self.seconds_left),
            "newest": self.newest,
            "restarts": self.restarts,
            "rollbacks": self.rollbacks,
            "goodput": None if spent is None else spent.share,
            "wall_seconds": None if spent is None else round(spent.wall, 3),
            "lost_seconds": None if spent is None else {cause: round(seconds, 3) for cause, seconds in spent.lost.items()},
            "process": self.process,
            "notes": list(self.notes),
        }


def _plain(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


def run_directories(place: Path) -> list[Path]:
    """Returns the directories of the runs below a place, or the place itself if it is one; sorted by path.

    Runs inside runs, hidden folders, and runs that `--fresh` moved aside are left out.

    Raises:
        DataError: the place is not a directory, or there is no run.
    """
    if not place.is_dir():
        raise DataError(
            f"{place} is not a directory: give a folder of runs, or a run's directory; forge-train run makes runs/NAME"
        )
    if found := sorted(_below(place, DEEPEST, {_number_of(place.stat())})):
        return found
    raise DataError(f"{place} has no run: no directory in it has {METRICS}; give a folder of runs, or a run's directory")


def _number_of(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def _below(folder: Path, deepest: int, seen: set[tuple[int, int]]) -> Iterator[Path]:
    try:
        with os.scandir(folder) as listing:
            entries = {entry.name: entry for entry in listing}
    except OSError:  # a folder of another user, or one that has just been removed
        return
    if not _MARKS.isdisjoint(entries):
        yield folder
        return
    if deepest == 0:
        return
    aside = {path.name for path in previous(folder)} if RECIPE in entries else set[str]()
    for name, entry in entries.items():
        if name.startswith(".") or name in aside:
            continue
        with suppress(OSError):
            if entry.is_dir() and (number_ := _number_of(entry.stat())) not in seen:  # links may form a circle
                seen.add(number_)
                yield from _below(folder / name, deepest - 1, seen)


def overview(directory: Path, now: float) -> RunOverview:
    """Reads a run at the time `now`, in seconds since 1970. Files that cannot be read leave a note."""
    run = RunOverview(directory)
    try:
        starts, damaged = read_starts(directory / STARTS)
        if damaged:
            run.notes.append(f"{damaged} line{'s' if damaged > 1 else ''} of {STARTS} cannot be read")
        with _opened(directory / METRICS) as (handle, size):
            _read(run, starts, handle, size, now)
    except OSError as cause:
        run.state, run.why = "unknown", f"{cause.filename or directory}: {cause.strerror}"
    return run


class _opened:  # noqa: N801 (a context manager)
    """An open file and its size; an empty one if it does not exist."""

    def __init__(self, path: Path) -> None:
        try:
            self.handle = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            self.handle = os.open(os.devnull, os.O_RDONLY)

    def __enter__(self) -> tuple[int, int]:
        return self.handle, os.fstat(self.handle).st_size

    def __exit__(self, *error: object) -> None:
        os.close(self.handle)


@dataclass
class _Newest:
    """The newest lines of a run, from which a restart has removed void ones.

    Attributes:
        lines: lines of hook `log`, newest first.
        time: time of the newest line of any kind; None without lines.
        position: newest step.
    """

    lines: list[MetricsLine] = field(default_factory=list)
    time: float | None = None
    position: int | None = None


def _read(run: RunOverview, starts: Sequence[RunStart], handle: int, size: int, now: float) -> None:
    newest = _newest(run, MetricsSegment(handle, 0, size), starts)
    run.step, run.newest = newest.position, newest.time
    if newest.lines:
        run.loss = metric_value(newest.lines[0].values["loss"])
        run.lr = metric_value(newest.lines[0].values.get("lr"))
    if not starts:
        _read_old(run)
        return
    last = starts[-1]
    run.max_steps = last.max_steps
    run.process = f"{last.process.pid} on {last.process.host}"
    run.rollbacks = sum(start.rollback for start in starts)
    run.restarts = len(starts) - 1 - run.rollbacks
    run.newest = max(filter(None, (run.newest, last.time, last.end and last.end.time)), default=None)
    if last.end is not None:
        run.step = last.end.step
    run.state, run.why = _state(run, last, newest, now)
    if run.state == "running":
        run.seconds_left = _left(run, last, newest, now)
    offsets = [start.metrics for start in starts]
    if offsets != sorted(offsets) or offsets[-1] > size:
        run.notes.append(f"{METRICS} is shorter than it was at the last start")
        return
    segments = [MetricsSegment(handle, begin, end) for begin, end in zip(offsets, [*offsets[1:], size], strict=True)]
    run.goodput = goodput(starts, segments)


def _newest(run: RunOverview, lines: MetricsSegment, starts: Sequence[RunStart]) -> _Newest:
    """Reads the newest valid lines of the metrics backward."""
    found = _Newest()
    if starts and starts[-1].metrics == lines.end:  # the newest start has no line yet
        found.position = starts[-1].step
    for line in valid_lines(lines, found.position):
        if isinstance(line, str):
            run.notes.append(line)
            continue
        found.time = found.time or line.time
        if found.position is None:
            found.position = line.step if line.rewind is None else line.rewind
        if line.is_of_log:
            found.lines.append(line)
        if len(found.lines) > _LOOKED_BACK or (found.lines and line.rewind is not None):
            break
    return found


def valid_lines(lines: MetricsSegment, limit: int | None = None) -> Iterator[MetricsLine | str]:
    """Yields the lines of the metrics, newest first, without those of steps that a restart has made void, and notes about damage.

    Args:
        lines: all lines of a run.
        limit: step after which all lines are void; None if there is no such step.
    """
    damaged = 0
    for place, text in enumerate(lines.backward()):
        line = line_of(text)
        if line is None:
            damaged += 1
            if damaged > _DAMAGED:
                return
            yield f"the last line of {METRICS} is incomplete" if place == 0 else f"a line of {METRICS} is damaged"
            continue
        if line.rewind is not None:
            limit = line.rewind if limit is None else min(limit, line.rewind)
            yield line
        elif limit is None or (line.step is not None and line.step <= limit):
            yield line


def last_values(directory: Path) -> dict[str, tuple[int, float]]:
    """Returns the newest value of every metric, with its step; of values that are not numbers, none.

    Raises:
        DataError: the metrics cannot be read.
    """
    values: dict[str, tuple[int, float]] = {}
    try:
        with _opened(directory / METRICS) as (handle, size):
            for place, line in enumerate(valid_lines(MetricsSegment(handle, 0, size))):
                if place > _LINES_OF_VALUES:
                    break
                if isinstance(line, str) or line.step is None:
                    continue
                for name, value in line.values.items():
                    read = metric_value(value)
                    if name not in ("step", "time", *values) and read is not None:
                        values[name] = line.step, read
    except OSError as cause:
        raise DataError(f"{directory / METRICS} cannot be read: {cause.strerror}") from cause
    return values


def _state(run: RunOverview, last: RunStart, newest: _Newest, now: float) -> tuple[str, str]:
    """Returns the state of a run with a recorded start, and its evidence."""
    end = last.end
    if end is not None and end.code is not None:
        return _CODES.get(end.code, "failed"), end.status
    owner = _owner(run.directory)
    if end is None and owner is not None and owner != last.mark:
        return "superseded", "another job has taken its checkpoints"
    alive = last.process.is_alive()
    if alive:
        return "running", f"process {run.process} is alive"
    if alive is False:
        return "failed", f"crashed: process {run.process} has ended without a record"
    age, silent = now - (run.newest or last.time), _silent(newest)
    if age <= silent:
        return "running", f"process {run.process} has written {duration(age)} ago"
    return "failed", f"crashed: process {run.process} has written nothing for {duration(age)}"


def _silent(newest: _Newest) -> float:
    """Returns how old the newest record of a running run may be."""
    times = [line.time for line in newest.lines]
    gaps = [later - earlier for later, earlier in pairwise(times)]
    return max(SILENT_SECONDS, SILENT_LINES * max(gaps, default=0.0))


def _owner(directory: Path) -> str | None:
    """Returns the mark of the job that owns the run's checkpoints; None if they are elsewhere or it cannot be read."""
    try:
        return str(json.loads((directory / CHECKPOINTS / "owner").read_bytes())["mark"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _left(run: RunOverview, last: RunStart, newest: _Newest, now: float) -> float | None:
    """Returns the seconds until the last step, at the pace of the newest lines of this start, with pauses."""
    lines = [line for line in newest.lines if line.time >= last.time]
    if run.step is None or not lines or lines[0].step is None or lines[-1].step is None:
        return None
    steps = lines[0].step - lines[-1].step
    pace = (lines[0].time - lines[-1].time) / steps if steps > 0 else metric_value(lines[0].values.get("step_seconds"))
    if pace is None or not math.isfinite(pace):
        return None
    return max(0.0, (last.max_steps - lines[0].step) * pace - max(0.0, now - lines[0].time))


def _read_old(run: RunOverview) -> None:
    """Reads what directories without a record of starts have: the report of the end, and the recipe."""
    run.why = f"it has no {STARTS}: an older version of Forge wrote it"
    with suppress(OSError, ValueError):
        recipe = tomllib.loads((run.directory / RECIPE).read_text(encoding="utf-8"))
        steps = recipe.get("train", {}).get("max_steps")
        run.max_steps = steps if isinstance(steps, int) else None
    try:
        report = json.loads((run.directory / SUMMARY).read_bytes())
        status, ended = report["status"], report["ended"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    end = line_of(json.dumps({"step": 0, "time": ended}).encode())
    if isinstance(status, str) and end is not None and (run.newest is None or run.newest <= end.time):
        run.newest = end.time
        run.state, run.why = "preempted" if status == STOPPED else "finished", status
