"""The report of a hang: the status and the stacks of every rank, and the ranks that the others wait for."""

import gc
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

from forge_parallel.launch.large_store import absent, values
from forge_parallel.torch_private import flight_record

WAITS = ("torch.distributed", "torch._ops", "forge_parallel.placement.collectives", "forge_parallel.placement.topology")
"""Modules in whose functions a process waits for other processes."""

WATCHING = "forge-watch"
"""Name of the thread that watches the other ranks."""

_LIBRARY = (f"{sep}torch{sep}", sysconfig.get_path("stdlib") + sep)
_DEBUGGERS = ("bdb", "pdb", "pydevd")
RANKS_SHOWN = 4
_OUTER = 8
_LONGEST = 20_000


class RankStatus(NamedTuple):
    """The status that a rank publishes.

    Attributes:
        passed: number of marks that the rank has passed.
        doing: what began at the last mark.
        where: the current line of code.
        seconds: time since the rank was first seen at this line.
        waits: whether it waits there for other ranks.
        held: seconds since the last mark.
        limit: maximum number of seconds until the next mark; None if unknown.
        stack: the calling lines of code, outermost last.
        calls: number of completed calls of observing hooks.
        silent: seconds since a new status was received, if that is too long; 0 otherwise.
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
    silent: float = 0.0

    def __str__(self) -> str:
        silent = f"; no status for {self.silent:.0f} s: stopped, or the network to its host is cut" if self.silent else ""
        return f"rank {self.rank} ({self.who}; {self.doing}, {self.where}, {self.seconds:.0f} s{silent})"

    @property
    def is_over(self) -> bool:
        """Whether the rank has exceeded its limit."""
        return self.limit is not None and self.held > self.limit


def late(seen: Mapping[int, RankStatus], silent: Sequence["RankStatus | str"] = ()) -> "Sequence[RankStatus | str]":
    """Returns the ranks that the others wait for.

    These are the silent ranks, if there are any. Otherwise, if all ranks wait and most of them at the same place, those that wait
    elsewhere, for example after a collective that they skipped. Otherwise, of the ranks with the fewest marks, those that do not
    wait, or all of them.
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


def several(ranks: "Sequence[RankStatus | str]", count: int = 0) -> str:
    """Formats the first few ranks, and the number of the others, of `count` ranks if `ranks` are only the first ones."""
    more = max(count, len(ranks)) - RANKS_SHOWN
    return "; ".join(map(str, ranks[:RANKS_SHOWN])) + (f", and {more} more ranks" if more > 0 else "")


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields a frame and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def frames_of(trace: TracebackType | None) -> Iterator[FrameType]:
    """Yields the frames of a traceback, outermost first."""
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def is_waiting(stack: Sequence[FrameType]) -> bool:
    """Whether the innermost frame, the first one, is in a function that waits for other processes."""
    return any(_module(frame).startswith(WAITS) for frame in stack[:1])


def is_debugged(stack: Sequence[FrameType]) -> bool:
    """Whether the process is stopped in a debugger."""
    return any(_module(frame).partition(".")[0] in _DEBUGGERS for frame in stack)


def place(stack: Sequence[FrameType]) -> str:
    """Returns the innermost line outside torch and Python's library, from frames given innermost first: `loop.py:24 (fit)`."""
    return next(iter(places(stack)), "an unknown place")


def places(stack: Sequence[FrameType]) -> list[str]:
    """Returns the innermost lines outside torch and Python's library."""
    own = [frame for frame in stack if not _in_library(frame)][:_OUTER]
    return [f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})" for frame in own]


_LOOKING = threading.Lock()


def frames_of_threads() -> dict[int, FrameType]:
    """Returns the current frame of each thread by thread identifier. Automatic garbage collection is off during the call.

    Before Python 3.11.9, `sys._current_frames` holds an interpreter lock. A collection that frees a `threading.local` needs the
    same lock, so the process would deadlock with the GIL held (python/cpython#106883).
    """
    with _LOOKING:
        collects = sys.version_info < (3, 11, 9) and gc.isenabled()
        if collects:
            gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


def stacks_of_all_threads() -> str:
    """Returns the stacks of all threads except the watching one: the main thread first, the newest call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(frames_of_threads().items(), key=lambda item: names.get(item[0]) != "MainThread")
    stacks = [f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame))}" for number, frame in frames]
    return "".join(stack for stack in stacks if not stack.startswith(f"thread {WATCHING}"))[:_LONGEST]


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")


def _in_library(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith("<") or _LIBRARY[0] in name or (name.startswith(_LIBRARY[1]) and "site-packages" not in name)


_NEWEST = 200
_RECORDS_SHOWN = 5


class Entered(NamedTuple):
    """A collective that a rank has entered: its group, its sequence number in the group, and its name with input shapes."""

    group: str
    number: int
    what: str


def collectives() -> list[Entered]:
    """Returns this process's newest collectives, oldest first; empty if torch does not record them (`TORCH_FR_BUFFER_SIZE`)."""
    entered = []
    for entry in flight_record()[-_NEWEST:]:
        if not entry.get("is_p2p"):
            what = f"{entry['profiling_name']} {entry['input_sizes']}"
            entered.append(Entered(" ".join(map(str, entry["process_group"])), entry["collective_seq_id"], what))
    return entered


def parting(records: Mapping[int, Sequence[Entered]]) -> str:
    """Describes where ranks diverge: the first collective that ranks of a group entered differently or not at all; "" if none.

    Compares only sequence numbers that all records of the group contain. A group consists of the ranks whose records name it.
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
    """Returns the text of the report.

    Args:
        cause: which ranks hang, and where.
        ranks: rank -> its own report, or its last known status.
        records: rank -> its newest collectives.
    """
    parts = [cause, parting(records)]
    for rank, report in sorted(ranks.items()):
        newest = "\n".join(f"  {entry.group} #{entry.number} {entry.what}" for entry in records.get(rank, ())[-_RECORDS_SHOWN:])
        parts += [f"--- rank {rank} ---", report.rstrip(), f"newest collectives:\n{newest}" if newest else ""]
    return "\n".join(filter(None, parts)) + "\n"


def answer(store: Any, rank: int, said: str) -> None:
    """Stores this rank's contribution to the report."""
    store.set(f"stacks/{rank}", json.dumps([said, collectives()]))


def answers(store: Any, others: Mapping[int, str], seconds: float) -> tuple[dict[int, str], dict[int, Sequence[Entered]]]:
    """Returns the contributions of other ranks and their collectives. A rank that does not answer in time keeps its text in
    `others`."""
    told, records, keys = dict(others), dict[int, Sequence[Entered]](), {rank: f"stacks/{rank}" for rank in others}
    until = time.monotonic() + seconds
    left = list(keys.values())
    while (left := absent(store, left)) and time.monotonic() < until:
        time.sleep(seconds / 20)
    unanswered = set(left)
    answered = {rank: key for rank, key in keys.items() if key not in unanswered}
    for rank, text in zip(answered, values(store, list(answered.values())), strict=True):
        told[rank], entries = json.loads(text)
        records[rank] = [Entered(*entry) for entry in entries]
    return told, records


def append(path: Path, moment: str, report: str) -> None:
    """Appends a report to the file.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("a", encoding="utf-8") as file:
        file.write(f"=== {moment} ===\n{report}\n")
