"""Who keeps the others waiting: every rank writes where it is, and one that waits long reads what the others wrote.

A daemon thread per process does both, over a second connection to the group's store, once a second. The training thread
only counts the marks that it passes; all ranks pass the same ones in the same order, so a smaller count is behind. Where a rank
is after a mark, and whether it waits in a collective, the thread sees in the stack of the training thread.

A rank that ends because of an error leaves a note, the first of which is what all others name as the cause. A rank that finds
such a note and does not end by itself, as when it is stuck, is ended by its thread.
"""

import contextlib
import faulthandler
import json
import logging
import os
import re
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, TextIO

import torch.distributed as dist

from forge_core.errors import ForgeError
from forge_parallel.launch.environment import Launch

_log = logging.getLogger(__name__)

_WAITS = ("torch.distributed", "torch._ops", "forge_parallel.placement.collectives", "forge_parallel.placement.groups")
"""Modules in whose functions a process that waits for another one is."""

_LIBRARY = (f"{os.sep}torch{os.sep}", sysconfig.get_path("stdlib") + os.sep)

_BROKEN = re.compile(
    r"Connection (closed|reset|refused)|[Tt]imed? ?out|Broken pipe|Socket closed|Failed to recv|remote process exited|"
    r"communicator was aborted"
)
_STORE_GONE = "the process that keeps the group's store (rank 0, or torchrun's agent) is gone"
_READ_SECONDS = 10.0
_SHOWN = 4


class PeerFailure(ForgeError):
    """Another rank ended or did not come; this one could do nothing about it."""

    exit_code = 5

    def __init__(self, message: str, exit_code: int = 5) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Sight(NamedTuple):
    """What a rank says of itself: how many marks it has passed, what it does, where, for how many seconds, and whether it waits
    for others there."""

    rank: int
    who: str
    beat: int
    passed: int
    doing: str
    where: str
    seconds: float
    waits: bool

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.who}; {self.doing}, {self.where}, {self.seconds:.0f} s)"


def is_broken_connection(error: BaseException) -> bool:
    """Whether an error, or what caused it, is that of a collective whose other side is gone or late."""
    seen: BaseException | None = error
    while seen is not None:
        text = str(seen)
        if isinstance(seen, RuntimeError) and ("gloo" in text or isinstance(seen, dist.DistError)) and _BROKEN.search(text):
            return True
        seen = seen.__cause__
    return False


class Watch:
    """Of one process; one without a store (a world of one) only counts marks.

    Args:
        patience: seconds after which a rank that waits says for whom.
        timeout: seconds after which a rank that waits gives up, where the group's own limit has not ended it.
        log: file that the stacks of a rank that is stuck are appended to; see `log_to`.
        hosts: this process keeps the group's store, so it ends after the others have read the note.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        store: Any = None,
        patience: float = 30.0,
        timeout: float = 600.0,
        log: Path | None = None,
        hosts: bool = False,
    ) -> None:
        self.hosts = hosts
        self.rank, self.size, self.patience, self.timeout = rank, size, patience, timeout
        self.passed, self.doing = 0, "the start"
        self._store, self._log = store, log
        self._file: TextIO | None = None
        self._known: dict[str, Any] | None = None
        self._interval, self._grace = min(1.0, patience / 5), min(10.0, patience)
        self._main = threading.get_ident()
        self._who = f"process {os.getpid()} on {socket.gethostname()}"
        self._mark: tuple[Any, ...] = ()
        self._since = time.monotonic()
        self._told, self._beat = 0.0, 0
        self._heard: dict[int, tuple[int, float]] = {}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forge-watch", daemon=True)

    @classmethod
    def open(cls, where: Launch, patience: float, timeout: float) -> "Watch":
        """The watch of this process, running; its group is open. `stop` ends it."""
        if where.size == 1:
            return cls()
        tcp = dist.TCPStore(where.address, where.port, is_master=False, timeout=timedelta(seconds=30), wait_for_workers=False)
        store = dist.PrefixStore(f"forge/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/watch", tcp)
        hosts = where.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        watch = cls(where.rank, where.size, store, patience, timeout, hosts=hosts)
        watch.start()
        return watch

    def start(self) -> None:
        """Starts the thread."""
        if self._log is not None:
            self.log_to(self._log)
        self._thread.start()

    def log_to(self, path: Path) -> None:
        """From here on, the stacks of this rank are appended to a file when it is stuck."""
        if self._store is not None:
            self._file = path.open("a")

    def stop(self) -> None:
        """Ends the thread: from here on this rank waits for no other."""
        self._done.set()
        if self._thread.is_alive():
            self._thread.join(5)
        if self._file is not None:
            faulthandler.cancel_dump_traceback_later()
            self._file.close()
            self._file = None

    def enter(self, doing: str) -> None:
        """Passes a mark that every rank passes; `doing` is what begins there."""
        self.passed += 1
        self.doing = doing

    def failed(self, message: str, exit_code: int) -> None:
        """Tells the others that this rank ends, and why. Only the first note of all ranks counts."""
        if self._store is None:
            return
        self.stop()
        with contextlib.suppress(RuntimeError):  # the store is gone: the others know
            if self._known is None:  # else another one was first, and may have taken the store along
                named = f"rank {self.rank} ended first, with exit code {exit_code}: {message}"
                self._leave_note(named, exit_code if exit_code == 75 else 5)
                self._store.set(f"read/{self.rank}", "")
            if self.hosts:
                self._wait_until_read()

    def explain(self, error: BaseException) -> PeerFailure:
        """What to say instead of `error`, which is a broken connection: the first cause, by name. Takes up to three seconds."""
        if self._store is None:
            return PeerFailure(f"a connection broke: {error}")
        where = _named(list(_frames(error.__traceback__))[::-1])
        try:
            note = self._known or self._cause()
        except RuntimeError:
            note = self._known or {"message": _STORE_GONE, "code": 5}
        hints = "".join(f"; {hint}" for hint in getattr(error, "__notes__", ()))
        return PeerFailure(
            f"{note['message']}. Rank {self.rank} of {self.size} waited for it in {self.doing}, {where}; start the run again, "
            f"it resumes from its newest checkpoint{hints}",
            note["code"],
        )

    def _cause(self) -> dict[str, Any]:
        """The first note; where there is none, this rank finds out and leaves it."""
        first, moved = self._sights(), set[int]()
        deadline = time.monotonic() + 3 * self._interval
        while len(moved) < len(first) or len(first) < self.size - 1:
            if note := self._note():
                return note
            if time.monotonic() > deadline:
                break
            time.sleep(self._interval / 10)
            moved |= {rank for rank, sight in self._sights().items() if rank not in first or sight.beat != first[rank].beat}
        now = self._sights()
        unmoved = [rank for rank in range(self.size) if rank not in moved and rank != self.rank]
        gone = [now.get(rank) or f"rank {rank} (never heard of)" for rank in unmoved]
        if gone:
            message = f"{_several(gone)} ended without a word: killed, out of memory or stopped"
        elif late := self._late(now):
            message = f"{_several(late)} did not come within {self.timeout:g} s"
        else:
            message = "the connection to another rank broke though all are there: look at the network"
        return self._leave_note(message, 5)

    def _run(self) -> None:
        cause = None
        while cause is None:
            if self._done.wait(self._interval):
                return
            try:
                cause = self._look()
            except RuntimeError:  # and it is not asked again: torch writes a page to the terminal each time
                cause = _STORE_GONE
        if not self._done.wait(self._grace):  # this process may be about to end by itself, with more to say
            self._leave(cause)

    def _look(self) -> str | None:
        """One beat; why this process has to end, if it has to."""
        if self._file is not None:  # a thread of C ends the process even when the interpreter's lock is never given back
            faulthandler.dump_traceback_later(self.timeout + 2 * self._grace, exit=True, file=self._file)
        mine = self._sight()
        self._beat += 1
        self._store.set(f"rank/{self.rank}", json.dumps(mine._replace(beat=self._beat)))
        if (note := self._note()) is not None:
            self._store.set(f"read/{self.rank}", "")
            return note["message"]
        if not mine.waits:
            return None
        if mine.seconds > self.timeout:
            late = _several(self._late(self._sights()))
            return self._leave_note(f"{late} did not come within {self.timeout:g} s", 5)["message"]
        if self._told == 0 and mine.seconds > self.patience / 2:
            self._told = self.patience / 2
            self._late(self._sights())  # only who moves between two looks is heard of
        elif self._told and mine.seconds > 2 * self._told:
            self._told *= 2
            if late := self._late(self._sights()):
                _log.warning("waiting for %.0f s in %s, %s, for %s", mine.seconds, mine.doing, mine.where, _several(late))
        return None

    def _leave(self, cause: str) -> None:
        """The last words of a process whose training thread is stuck."""
        mine = self._sight()
        said = (
            f"the others have given up: {cause}. This rank is in {mine.doing}, {mine.where}, for {mine.seconds:.0f} s; its "
            "stacks are in its log"
        )
        # The stuck thread may hold the lock of a log or of the terminal.
        words = threading.Thread(target=lambda: _log.error("%s", said), daemon=True)
        words.start()
        words.join(2)
        if self._file is not None:
            faulthandler.dump_traceback(self._file, all_threads=True)
        os._exit(5)

    def _note(self) -> dict[str, Any] | None:
        """The first note, if another rank has left it. It is kept: who left it may take the store along."""
        if self._known is None and self._store.check(["ended"]):
            note = json.loads(self._store.get("ended"))
            self._known = None if note["rank"] == self.rank else note
        return self._known

    def _wait_until_read(self) -> None:
        """Returns when every other rank has read the note, has stopped to give signs of life, or after ten seconds."""
        before, began = self._sights(), time.monotonic()
        left = set(range(self.size)) - {self.rank}
        while left and time.monotonic() - began < _READ_SECONDS:
            time.sleep(self._interval / 5)
            left = {rank for rank in left if not self._store.check([f"read/{rank}"])}
            if time.monotonic() - began > max(3 * self._interval, 2.0):
                now = self._sights()
                left -= {rank for rank, sight in before.items() if now[rank].beat == sight.beat}

    def _leave_note(self, message: str, code: int) -> dict[str, Any]:
        """The note that counts: this one, or the one that was there."""
        mine = json.dumps({"rank": self.rank, "message": message, "code": code})
        return json.loads(self._store.compare_set("ended", "", mine))

    def _sights(self) -> dict[int, Sight]:
        """What the other ranks wrote; those that never did are left out."""
        keys = {rank: f"rank/{rank}" for rank in range(self.size) if rank != self.rank}
        known = [rank for rank, key in keys.items() if self._store.check([key])]
        found = {rank: Sight(*json.loads(self._store.get(keys[rank]))) for rank in known}
        now = time.monotonic()
        for rank, sight in found.items():
            if self._heard.get(rank, (None, 0.0))[0] != sight.beat:
                self._heard[rank] = sight.beat, now
        return found

    def _late(self, sights: dict[int, Sight]) -> "Sequence[Sight | str]":
        """The ranks that the others wait for: those without a sign of life, those behind, those that do something else; all of
        the others where each waits for another one."""
        now, quiet = time.monotonic(), max(5 * self._interval, self.patience / 4)
        quiet_ranks = [
            rank for rank in range(self.size) if rank != self.rank and (rank not in sights or now - self._heard[rank][1] > quiet)
        ]
        silent = [sights.get(rank) or f"rank {rank} (never heard of)" for rank in quiet_ranks]
        behind = [sight for sight in sights.values() if sight.passed < self.passed]
        busy = [sight for sight in sights.values() if sight.passed == self.passed and not sight.waits]
        return silent or behind or busy or list(sights.values())

    def _sight(self) -> Sight:
        """Where the training thread is; `seconds` counts from when it was first seen there."""
        frame = sys._current_frames().get(self._main)
        passed, doing = self.passed, self.doing
        stack = list(_stack(frame))
        mark = (passed, *((id(each), each.f_lasti) for each in stack[:1]))
        if mark != self._mark:
            self._mark, self._since, self._told = mark, time.monotonic(), 0.0
        waits = any(each.f_globals.get("__name__", "").startswith(_WAITS) for each in stack[:1])
        return Sight(self.rank, self._who, self._beat, passed, doing, _named(stack), time.monotonic() - self._since, waits)


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _named(stack: list[FrameType]) -> str:
    """The innermost place that belongs to neither torch nor Python, of frames from the inside out: `loop.py:24 (fit)`."""
    own = next((frame for frame in stack if not _in_library(frame)), None)
    return f"{Path(own.f_code.co_filename).name}:{own.f_lineno} ({own.f_code.co_name})" if own else "an unknown place"


def _in_library(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith("<") or _LIBRARY[0] in name or (name.startswith(_LIBRARY[1]) and "site-packages" not in name)


def _several(ranks: "Sequence[Sight | str]") -> str:
    more = f", and {len(ranks) - _SHOWN} more ranks" if len(ranks) > _SHOWN else ""
    return "; ".join(map(str, ranks[:_SHOWN])) + more
