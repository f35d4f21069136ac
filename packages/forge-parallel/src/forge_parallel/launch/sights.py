"""What ranks say of themselves, and which of them the others wait for."""

import sys
import sysconfig
import threading
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from os import sep
from pathlib import Path
from types import FrameType, TracebackType
from typing import NamedTuple

WAITS = ("torch.distributed", "torch._ops", "forge_parallel.placement.collectives", "forge_parallel.placement.groups")
"""Modules in whose functions a process that waits for another one is."""

WATCHING = "forge-watch"
"""Name of the thread that looks at the others."""

_LIBRARY = (f"{sep}torch{sep}", sysconfig.get_path("stdlib") + sep)
_DEBUGGERS = ("bdb", "pdb", "pydevd")
_RANKS_SHOWN = 4
_OUTER = 8
_LONGEST = 20_000


class RankStatus(NamedTuple):
    """What a rank says of itself.

    Attributes:
        passed: marks that it has passed.
        doing: what began at the newest one.
        where: the line of code that it is in.
        seconds: since it was first seen there.
        waits: whether it waits for others there.
        held: seconds since the newest mark.
        limit: seconds that it may take until the next one; None while nothing is known.
        stack: where it was called from, the outermost last.
        calls: of hooks that observe, that it has come past.
    """

    rank: int
    who: str
    beat: int
    passed: int
    doing: str
    where: str
    seconds: float
    waits: bool
    held: float = 0.0
    limit: float | None = None
    stack: Sequence[str] = ()
    calls: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.who}; {self.doing}, {self.where}, {self.seconds:.0f} s)"

    @property
    def is_over(self) -> bool:
        """Whether it has taken longer than it may."""
        return self.limit is not None and self.held > self.limit


def late(seen: Mapping[int, RankStatus], silent: Sequence["RankStatus | str"] = ()) -> "Sequence[RankStatus | str]":
    """The ranks that the others wait for.

    Those without a sign of life; else, where all wait and most of them do so at one place, those that wait elsewhere, as after a
    collective that they left out; else, of those with the fewest marks, those that do not wait, or all of them.
    """
    if silent:
        return silent
    everyone = list(seen.values())
    if all(sight.waits for sight in everyone):
        places = Counter((sight.passed, sight.where) for sight in everyone)
        (most, count), *others = places.most_common()
        if others and 2 * count > len(everyone):
            return [sight for sight in everyone if (sight.passed, sight.where) != most]
    lowest = min(sight.passed for sight in everyone)
    last = [sight for sight in everyone if sight.passed == lowest]
    return [sight for sight in last if not sight.waits] or last


def several(ranks: "Sequence[RankStatus | str]") -> str:
    """The first of them, and how many more there are."""
    more = f", and {len(ranks) - _RANKS_SHOWN} more ranks" if len(ranks) > _RANKS_SHOWN else ""
    return "; ".join(map(str, ranks[:_RANKS_SHOWN])) + more


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def frames_of(trace: TracebackType | None) -> Iterator[FrameType]:
    """Of a traceback, from the outside in."""
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def is_waiting(stack: Sequence[FrameType]) -> bool:
    """Whether the innermost of these frames is one in which a process waits for others."""
    return any(_module(frame).startswith(WAITS) for frame in stack[:1])


def is_debugged(stack: Sequence[FrameType]) -> bool:
    """Whether a person holds the process in a debugger."""
    return any(_module(frame).partition(".")[0] in _DEBUGGERS for frame in stack)


def place(stack: Sequence[FrameType]) -> str:
    """The innermost place that belongs to neither torch nor Python, of frames from the inside out: `loop.py:24 (fit)`."""
    return next(iter(places(stack)), "an unknown place")


def places(stack: Sequence[FrameType]) -> list[str]:
    """The innermost places that belong to neither torch nor Python."""
    own = [frame for frame in stack if not _in_library(frame)][:_OUTER]
    return [f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})" for frame in own]


def stacks_of_all_threads() -> str:
    """Of this process, the main thread first, without the one that watches; the newest call is last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda item: names.get(item[0]) != "MainThread")
    found = [f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame))}" for number, frame in frames]
    return "".join(each for each in found if not each.startswith(f"thread {WATCHING}"))[:_LONGEST]


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")


def _in_library(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith("<") or _LIBRARY[0] in name or (name.startswith(_LIBRARY[1]) and "site-packages" not in name)
