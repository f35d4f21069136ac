"""A trace of torch.profiler, in Chrome's format, as plain events. Times are whole nanoseconds, so that sums are exact."""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_core.errors import ForgeError

ABOUT = "forge"
"""Key of a trace under which hook `profile` says whose it is."""

WINDOW = "forge/window"
"""Annotation around the steps of a window, from the first to when the device has done the last."""

DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
"""Categories of work on a device."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that took time.

    Attributes:
        name: of the kernel, operator, call or annotation.
        category: torch's: `kernel`, `gpu_memcpy`, `gpu_memset`, `cpu_op`, `user_annotation`, `cuda_runtime`, ...
        lane: process and thread, or device and stream: what is on one lane is nested or apart.
        start, end: nanoseconds by the clock of the rank; equal for what took no time.
        args: what torch says besides.
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
        about: `rank`, `world`, `step` (the first of the window), `steps`, `device`, where hook `profile` wrote the trace.
    """

    events: tuple[Event, ...]
    about: Mapping[str, Any] = field(default_factory=dict)

    def of(self, *categories: str) -> Iterator[Event]:
        """Those of some categories."""
        return (event for event in self.events if event.category in categories)

    @property
    def window(self) -> tuple[int, int]:
        """What is summed up: the window of hook `profile`; of other traces the steps of torch.profiler, else from the first to
        the last event. Work of the device that outlasts the steps belongs to them.

        Raises:
            ForgeError: the trace has no event that took time.
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


def read(path: Path) -> Trace:
    """Reads `.json` or `.json.gz`.

    Raises:
        ForgeError: it is not a trace, or its end is missing.
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
    """Complete events (`ph` is X); marks, flows and names of lanes take no time."""
    for item in items:
        if item.get("ph") == "X":
            start = _nanoseconds(item["ts"])
            end = max(start, _nanoseconds(item["ts"] + item.get("dur", 0)))
            lane = (str(item.get("pid", "")), str(item.get("tid", "")))
            yield Event(str(item["name"]), str(item.get("cat", "")), lane, start, end, item.get("args") or {})


def _nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1000)
