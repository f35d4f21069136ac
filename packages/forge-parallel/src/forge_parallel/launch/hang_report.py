"""The report of a hang: the status of every rank, its stacks, and for which ranks the others wait."""

import json
import sys
import sysconfig
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from os import sep
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from forge_parallel.torch_private import flight_record

WAITS = ("torch.distributed", "torch._ops", "forge_parallel.placement.collectives", "forge_parallel.placement.topology")
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


_NEWEST = 200
_RECORDS_SHOWN = 5


class Entered(NamedTuple):
    """A collective that a rank has entered: of which group, its number there, what it is and of which shapes."""

    group: str
    number: int
    what: str


def collectives() -> list[Entered]:
    """The newest collectives of this process, oldest first; none where torch keeps no record (`TORCH_FR_BUFFER_SIZE`)."""
    found = []
    for entry in flight_record()[-_NEWEST:]:
        if not entry.get("is_p2p"):
            what = f"{entry['profiling_name']} {entry['input_sizes']}"
            found.append(Entered(" ".join(map(str, entry["process_group"])), entry["collective_seq_id"], what))
    return found


def parting(records: Mapping[int, Sequence[Entered]]) -> str:
    """Where ranks part: the first collective of a group that some of them entered as another one, or not at all; else empty.

    Only numbers count that every record of the group reaches back to. A group is that of the ranks that have it in their record.
    """
    groups: defaultdict[str, dict[int, dict[int, str]]] = defaultdict(dict)
    for rank, entries in records.items():
        for group, number, what in entries:
            groups[group].setdefault(rank, {})[number] = what
    for group, by_rank in groups.items():
        first = max(min(numbers) for numbers in by_rank.values())
        last = max(max(numbers) for numbers in by_rank.values())
        for number in range(first, last + 1):
            who: defaultdict[str, list[int]] = defaultdict(list)
            for rank, numbers in sorted(by_rank.items()):
                who[numbers.get(number, "nothing")].append(rank)
            if len(who) > 1:
                sides = "; ".join(f"rank {', '.join(map(str, ranks))}: {what}" for what, ranks in who.items())
                return f"ranks part at collective {number} of group {group}: {sides}"
    return ""


def text(cause: str, ranks: Mapping[int, str], records: Mapping[int, Sequence[Entered]]) -> str:
    """The report.

    Args:
        cause: who hangs, and where.
        ranks: what each rank says, or what was last heard of it.
        records: its newest collectives.
    """
    parts = [cause, parting(records)]
    for rank, said in sorted(ranks.items()):
        newest = "\n".join(f"  {entry.group} #{entry.number} {entry.what}" for entry in records.get(rank, ())[-_RECORDS_SHOWN:])
        parts += [f"--- rank {rank} ---", said.rstrip(), f"newest collectives:\n{newest}" if newest else ""]
    return "\n".join(filter(None, parts)) + "\n"


def answer(store: Any, rank: int, said: str) -> None:
    """Puts into the store what a rank adds to the report."""
    store.set(f"stacks/{rank}", json.dumps([said, collectives()]))


def answers(store: Any, others: Mapping[int, str], seconds: float) -> tuple[dict[int, str], dict[int, Sequence[Entered]]]:
    """What other ranks add, and their collectives. One that does not answer in time is known by what is given for it."""
    told, records, keys = dict(others), dict[int, Sequence[Entered]](), {rank: f"stacks/{rank}" for rank in others}
    until = time.monotonic() + seconds
    while keys and not store.check(list(keys.values())) and time.monotonic() < until:
        time.sleep(seconds / 20)
    for rank, key in keys.items():
        if store.check([key]):
            told[rank], entries = json.loads(store.get(key))
            records[rank] = [Entered(*entry) for entry in entries]
    return told, records


def append(path: Path, moment: str, report: str) -> None:
    """Adds a report to a file of them.

    Raises:
        OSError: it cannot be written.
    """
    with path.open("a", encoding="utf-8") as file:
        file.write(f"=== {moment} ===\n{report}\n")
