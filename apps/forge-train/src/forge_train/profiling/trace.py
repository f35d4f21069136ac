"""Traces of torch.profiler: their files in a run's directory, their events in integer nanoseconds, and nesting of events."""

import gzip
import json
import re
import shutil
import zlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path
from typing import Any

from forge_core.errors import ForgeError

ABOUT = "forge"
"""Key of a trace under which hook `profile` stores its origin."""

WINDOW = "forge/window"
"""Annotation around the steps of a window, until the device has finished the last one."""

DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
"""Categories of work on a device."""


@dataclass(frozen=True, slots=True)
class Event:
    """An event with a duration.

    Attributes:
        name: name of the kernel, operator, call or annotation.
        category: torch's category: `kernel`, `gpu_memcpy`, `gpu_memset`, `cpu_op`, `user_annotation`, `cuda_runtime`, ...
        lane: process and thread, or device and stream; events on one lane are nested or disjoint.
        start, end: nanoseconds on the clock of the rank; may be equal.
        args: further values from torch.
    """

    name: str
    category: str
    lane: tuple[str, str]
    start: int
    end: int
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trace:
    """Events of one rank, in any order.

    Attributes:
        about: `rank`, `world`, `step` (the first of the window), `steps` and `device`, if hook `profile` wrote the trace.
    """

    events: tuple[Event, ...]
    about: Mapping[str, Any] = field(default_factory=dict)

    def of(self, *categories: str) -> Iterator[Event]:
        """Yields the events of some categories."""
        return (event for event in self.events if event.category in categories)

    @property
    def window(self) -> tuple[int, int]:
        """Begin and end of the analyzed time: the window of hook `profile`, else the steps of torch.profiler including later work
        of the device, else from the first to the last event.

        Raises:
            ForgeError: the trace has no event with a duration.
        """
        marks = [event for event in self.of("user_annotation") if event.name == WINDOW]
        if marks:
            return min(event.start for event in marks), max(event.end for event in marks)
        steps = [event for event in self.of("user_annotation") if event.name.startswith("ProfilerStep#")]
        begin = steps or self.events
        last = [*steps, *self.of(*DEVICE)] if steps else self.events
        start, end = min((event.start for event in begin), default=0), max((event.end for event in last), default=0)
        if start >= end:
            raise ForgeError("the trace has no event that took time: profile at least one step")
        return start, end


def read_trace(path: Path) -> Trace:
    """Reads a trace from a `.json` or `.json.gz` file.

    Raises:
        ForgeError: the file is not a trace, or is incomplete.
    """
    try:
        content = path.read_bytes()
        found = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
        items = found["traceEvents"] if isinstance(found, dict) else found
        return Trace(tuple(_events(items)), found.get(ABOUT, {}) if isinstance(found, dict) else {})
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, zlib.error) as cause:
        what = cause.strerror if isinstance(cause, OSError) and cause.strerror else f"{type(cause).__name__}: {cause}"
        raise ForgeError(f"{path} cannot be read as a trace ({what}); give a Chrome trace of torch.profiler") from cause


def _events(items: Any) -> Iterator[Event]:
    """Yields complete events (`ph` is X); marks, flows and names of lanes have no duration."""
    for item in items:
        if item.get("ph") == "X":
            start = _nanoseconds(item["ts"])
            end = max(start, _nanoseconds(item["ts"] + item.get("dur", 0)))
            lane = (str(item.get("pid", "")), str(item.get("tid", "")))
            yield Event(str(item["name"]), str(item.get("cat", "")), lane, start, end, item.get("args") or {})


def _nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1000)


PROFILES = "profiles"

_WINDOW = re.compile(r"step-(\d+)")
_RANK = re.compile(r"rank-(\d+)\.json(\.gz)?")


def folder_of(directory: Path, step: int) -> Path:
    """Returns the folder of the window that begins with a step."""
    return directory / PROFILES / f"step-{step}"


def trace_of(folder: Path, rank: int) -> Path:
    """Returns the path of a rank's trace."""
    return folder / f"rank-{rank}.json.gz"


def snapshot_of(folder: Path, rank: int) -> Path:
    """Returns the path of a rank's memory snapshot, for pytorch.org/memory_viz."""
    return folder / f"rank-{rank}.memory.pickle"


def windows(directory: Path) -> dict[int, Path]:
    """Returns the folders of all windows of a run by first step, in order."""
    place = directory / PROFILES
    found = place.iterdir() if place.is_dir() else ()
    named = {int(match[1]): path for path in found if (match := _WINDOW.fullmatch(path.name)) and path.is_dir()}
    return dict(sorted(named.items()))


def forget_old(directory: Path, keep: int) -> None:
    """Removes all windows except the `keep` newest ones.

    Raises:
        OSError: a window cannot be removed.
    """
    written = sorted(windows(directory).values(), key=lambda folder: folder.stat().st_mtime_ns)
    for folder in written[: max(0, len(written) - keep)]:
        shutil.rmtree(folder)


def chosen_traces(path: Path, step: int | None) -> dict[int, Path]:
    """Returns the paths of the traces of one window, by rank.

    Args:
        path: a run's directory, the folder of a window, or a trace.
        step: first step of the window; None chooses the newest window.

    Raises:
        ForgeError: there are no traces, or not this window.
    """
    if path.is_file():
        return {0: path}
    if not path.is_dir():
        raise ForgeError(f"{path} does not exist; give a run's directory, such as runs/demo, a folder with traces, or a trace")
    here = _traces(path)
    if here and step is None:
        return here
    found = windows(path)
    if not found:
        hint = 'add [[hooks]] name = "profile" with at = [STEP] to its recipe'
        raise ForgeError(f"{path} has no profiles; {hint}, or give a trace of torch.profiler")
    if step is not None and step not in found:
        raise ForgeError(f"--step {step}: {path} has profiles of the steps {', '.join(map(str, found))}")
    folder = max(found.values(), key=lambda folder: folder.stat().st_mtime_ns) if step is None else found[step]
    traces = _traces(folder)
    if not traces:
        raise ForgeError(f"{folder} has no complete trace; was the run stopped while it wrote one?")
    return traces


def traces_of(paths: Mapping[int, Path]) -> dict[int, Trace]:
    """Reads the traces of one window.

    Raises:
        ForgeError: a trace cannot be read, or traces are of runs with different numbers of ranks.
    """
    found = {rank: read_trace(path) for rank, path in paths.items()}
    worlds = {trace.about.get("world") for trace in found.values()}
    if len(worlds) > 1:
        raise ForgeError(
            f"the traces of {next(iter(paths.values())).parent} are of runs on {', '.join(map(str, worlds))} ranks; "
            "remove the older ones, or give one trace"
        )
    return found


def _traces(folder: Path) -> dict[int, Path]:
    named = {int(match[1]): path for path in folder.iterdir() if (match := _RANK.fullmatch(path.name))}
    return dict(sorted(named.items()))


Piece = tuple[int, int, Event]
"""Start, end, and the innermost event in between."""


def innermost(events: Iterable[Event]) -> list[Piece]:
    """Returns disjoint pieces of time in order, each with its innermost event: the running event that began last.

    The pieces of an event are its own time without the events that it calls, also if events are recorded twice or a child
    outlasts its parent by rounding. Events without a duration have no piece.
    """
    waiting = sorted(
        (event for event in events if event.end > event.start), key=lambda event: (event.start, -event.end, event.name)
    )
    points = sorted({point for event in waiting for point in (event.start, event.end)})
    running: list[tuple[int, int, str, int, Event]] = []
    pieces: list[Piece] = []
    place = 0
    for start, end in pairwise(points):
        while place < len(waiting) and waiting[place].start <= start:
            event = waiting[place]
            heappush(running, (-event.start, event.end, event.name, -place, event))
            place += 1
        while running and running[0][1] <= start:
            heappop(running)
        if not running:
            continue
        found = running[0][-1]
        if pieces and pieces[-1][1] == start and pieces[-1][2] is found:
            pieces[-1] = (pieces[-1][0], end, found)
        else:
            pieces.append((start, end, found))
    return pieces


class Enclosing:
    """Finds the innermost event on a lane at an instant."""

    def __init__(self, events: Iterable[Event]) -> None:
        lanes: dict[tuple[str, str], list[Event]] = defaultdict(list)
        for event in events:
            lanes[event.lane].append(event)
        self._pieces = {lane: innermost(found) for lane, found in lanes.items()}
        self._starts = {lane: [piece[0] for piece in pieces] for lane, pieces in self._pieces.items()}

    def lanes(self) -> Sequence[list[Piece]]:
        """Returns the pieces of every lane."""
        return list(self._pieces.values())

    def at(self, lane: tuple[str, str], instant: int) -> str:
        """Returns the name of the innermost event; "" if no event runs."""
        place = bisect_right(self._starts.get(lane, ()), instant) - 1
        if place < 0:
            return ""
        _, end, event = self._pieces[lane][place]
        return event.name if instant < end else ""
