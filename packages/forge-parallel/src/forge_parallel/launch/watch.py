"""The watch: every rank publishes its status, and a rank that waits long finds out which ranks it waits for.

A daemon thread in each process does both once a second, over a second connection to the group's store. The training thread only
counts the marks that it passes. All ranks pass the same marks in the same order, so a rank with a smaller count is behind. From
the stack of the training thread, the daemon thread sees the current line and whether it waits in a collective. Of many ranks that
wait, one at a time reads the status of all others and publishes for whom they wait (`large_store.ReadingTurn`).

A section of the run that exceeds its limit (`Limits`) is a hang, in a collective or in a rank's own work. The rank that detects
it first names the hanging rank and collects the reports of all ranks into `hang.txt`. It does so over the store, because
collectives hang. A rank that cannot report, for example because it is stopped or never gets the interpreter lock, appears with
its last status.

The limit of a section is learned from how long it took before (`forge_parallel.launch.limits`).

No call of the store has a time limit, and a connection that is cut is not reset: a second daemon thread reports a store that does
not answer, and ends this rank at the limit at which the first one would have.

A rank that ends with an error leaves a note. The first note is what all other ranks report as the cause. A rank that finds a note
but does not end by itself, for example because it hangs, is ended by its daemon thread.
"""

import contextlib
import faulthandler
import json
import logging
import math
import os
import re
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO, TypeVar

import torch.distributed as dist

from forge_core.errors import ForgeError
from forge_parallel.launch import hang_report
from forge_parallel.launch.environment import Launch, is_agents_store
from forge_parallel.launch.hang_report import RankStatus, several
from forge_parallel.launch.large_store import ReadingTurn, absent, pause_of, values
from forge_parallel.launch.limits import Limits, Unlimited
from forge_parallel.torch_private import store_with

_log = logging.getLogger(__name__)

T = TypeVar("T")

_BROKEN = re.compile(
    r"Connection (closed|reset|refused)|[Tt]imed? ?out|Broken pipe|Socket closed|Failed to recv|remote process exited|"
    r"communicator was aborted"
)
HANGS = "hang.txt"
"""File in the log folder of a run to which reports of hangs are appended."""

_STORE_GONE = "the process that hosts the group's store (rank 0, or torchrun's agent) has ended"
_CUT = "{host} at {at} has not answered for {seconds:.0f} s: it is stopped, or the network between its host and {own} is cut"
_READ_SECONDS = 10.0
_NOTE_SECONDS = 5.0
_LAST_SECONDS = 30.0


class PeerFailure(ForgeError):
    """Another rank ended or did not come; the error is not this rank's."""

    exit_code = 5

    def __init__(self, message: str, exit_code: int = 5) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def is_broken_connection(error: BaseException) -> bool:
    """Whether an error, or one of its causes, is a collective whose peer has ended or is late."""
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause)
        if isinstance(cause, RuntimeError) and ("gloo" in text or isinstance(cause, dist.DistError)) and _BROKEN.search(text):
            return True
        cause = cause.__cause__
    return False


class Watch:
    """The watch of one process; without a store it only counts marks.

    Time counts only while the thread runs, so a process that was stopped and continues does not exceed its limits.

    Attributes:
        calls: number of completed calls of observing hooks; all ranks make the same calls.

    Args:
        patience: seconds after which a waiting rank logs which ranks it waits for.
        timeout: seconds after which a waiting rank gives up, unless the group's own timeout has ended the wait before.
        limits: maximum durations of sections, with or without waiting.
        log: file to which the stacks of this rank are appended when it hangs; see `log_to`.
        hosts: whether this process hosts the group's store, so that it must end after the others have read the note.
        host: name of the process that hosts the store.
        at: address of the store.
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
        limits: Limits | None = None,
        host: str = "rank 0",
        at: str = "its store",
    ) -> None:
        self.hosts, self.host, self.at, self.limits = hosts, host, at, limits or Unlimited()
        self.rank, self.size, self.patience, self.timeout = rank, size, patience, timeout
        self.passed, self.doing, self.section = 0, "the start", ""
        self.calls = 0
        self._store, self._log = store, log
        self._file: TextIO | None = None
        self._folder: Path | None = None
        self._known: dict[str, Any] | None = None
        self._interval, self._grace = pause_of(size, min(1.0, patience / 5)), min(10.0, patience)
        self._main = threading.get_ident()
        self._who = f"process {os.getpid()} on {socket.gethostname()}"
        self._mark: tuple[Any, ...] = ()
        self._awake = self._since = self._entered = 0.0
        self._began = self._woke = time.monotonic()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._suspected, self._suspect_at = False, 0.0
        self._told, self._beat = 0.0, 0
        self._readings, self._read_at = 0, -math.inf
        self._reading, self._judging, self._giving_up = (
            self._turn(f"turn/{name}", 3 * self._interval) for name in ("reading", "judging", "giving up")
        )
        self._before: dict[str, Any] | None = None
        self._heard: dict[int, tuple[int, float]] = {}
        self._publishing: set[int] = set()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name=hang_report.WATCHING, daemon=True)
        self._looks, self._looking, self._left = 0, False, timeout
        self._unanswered, self._is_cut = 0.0, False
        self._second = threading.Thread(target=self._watch_store, name=f"{hang_report.WATCHING}-store", daemon=True)

    @classmethod
    def open(cls, where: Launch, patience: float, timeout: float) -> "Watch":
        """Returns the running watch of this process, whose process group is open. End it with `stop`."""
        if where.size == 1:
            watch = cls(store=dist.HashStore(), patience=patience, timeout=timeout)
            watch.start()
            return watch
        tcp = dist.TCPStore(where.address, where.port, is_master=False, timeout=timedelta(seconds=30), wait_for_workers=False)
        group = store_with("name")  # named by the meeting that opened the group
        name = group.get("name").decode() if group is not None else "watch"
        store = dist.PrefixStore(f"forge/{name}/watch", tcp)
        hosts = where.rank == 0 and not is_agents_store()
        host = "torchrun's agent" if is_agents_store() else "rank 0"
        if group is not None and not is_agents_store() and group.check(["at/0"]):
            host = group.get("at/0").decode()
        at = f"{where.address}:{where.port}"
        watch = cls(where.rank, where.size, store, patience, timeout, hosts=hosts, host=host, at=at)
        watch.start()
        return watch

    def start(self) -> None:
        """Starts the thread."""
        if self._log is not None:
            self.log_to(self._log)
        self._thread.start()
        if not self.hosts:
            self._second.start()

    def log_to(self, path: Path) -> None:
        """Sets the file to which this rank's stacks are appended when it hangs."""
        if self._store is not None:
            self._file, self._folder = path.open("a"), path.parent

    def stop(self) -> None:
        """Ends the thread: this rank does not wait for others any more."""
        self._done.set()
        if self._thread.is_alive():
            self._thread.join(5)
        if self._file is not None:
            faulthandler.cancel_dump_traceback_later()
            self._file.close()
            self._file = None

    def enter(self, doing: str, section: str = "") -> None:
        """Passes a mark that every rank passes. `doing` describes what begins; `section` is its kind, with its own limit."""
        self._entered, now = self._awake, time.monotonic()  # first, because the thread may look at any moment
        if self.section:
            self.limits.took(self.section, now - self._began)
        self._seconds[self.section] += now - self._began
        self._began = now
        self.passed, self.doing, self.section = self.passed + 1, doing, section

    def seconds(self) -> dict[str, float]:
        """Seconds of this rank in each section so far, the current one included."""
        now = time.monotonic() - self._began
        return {**self._seconds, self.section: self._seconds.get(self.section, 0.0) + now}

    def failed_in(self, call: int) -> bool | None:
        """Reports that this rank failed in call `call` of `calls`, which all ranks make, and waits for the others' results.

        Returns:
            True: all ranks failed in the call. False: the others have completed it or failed. None: another rank waits in a
            collective of the call, or the store cannot be reached, so this rank must not continue.
        """
        if self._store is None or not self._thread.is_alive():
            return None
        store, key, pause = self._store, f"call/{call}", self._interval / 20
        store.set(f"{key}/{self.rank}", "")
        store.add(f"{key}/failed", 1)
        turn = self._turn(f"{key}/turn", 3 * self._interval)
        while store.add(f"{key}/failed", 0) < self.size:
            if turn.mine() and (result := self._result_of(call)) != "unknown":
                store.compare_set(f"{key}/result", "", json.dumps(result))
            if store.check([f"{key}/result"]):
                return json.loads(store.get(f"{key}/result"))
            if self._note() is not None:
                return None
            time.sleep(pause)
            pause = min(1.5 * pause, self._interval / 2)
        return True

    def _result_of(self, call: int) -> bool | str | None:
        """Returns the result of `failed_in`, which is the same for all ranks that failed; "unknown" if some still compute."""
        keys = {f"call/{call}/{rank}": rank for rank in range(self.size) if rank != self.rank}
        left = [keys[key] for key in absent(self._store, list(keys))]
        seen = self._sights()
        working = [rank for rank in left if rank not in seen or seen[rank].calls <= call]
        if not working:
            return not left
        stuck = any(seen[rank].waits and seen[rank].seconds > self.patience for rank in working if rank in seen)
        return None if stuck else "unknown"

    def all_fail(self, step: int, seconds: float) -> bool:
        """Reports that this rank is about to end after a step. Returns whether all others report the same within `seconds`."""
        if self._store is None or not self._thread.is_alive():
            return False
        if self._store.add(f"fails/{step}/{self.rank}", 1) == 1:  # each rank counts once
            self._store.add(f"fails/{step}", 1)
        until, pause = time.monotonic() + seconds, self._interval / 20
        while self._store.add(f"fails/{step}", 0) < self.size:
            if time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(1.5 * pause, self._interval / 2)
        return True

    def failed(self, message: str, exit_code: int) -> None:
        """Leaves a note with the reason why this rank ends. Only the first note of all ranks counts."""
        if self._store is None or self._is_cut:
            return
        self.stop()

        def leave_note() -> None:
            if self._known is None:  # otherwise another rank was first, and may have ended the store
                named = f"rank {self.rank} ended first, with exit code {exit_code}: {message}"
                self._leave_note(named, exit_code if exit_code == 75 else 5)
                self._store.set(f"read/{self.rank}", "")
            if self.hosts:
                self._wait_until_read()

        with contextlib.suppress(RuntimeError, TimeoutError):  # the store is gone or silent, so the others know already
            self._within(_NOTE_SECONDS + _READ_SECONDS * self.hosts, leave_note)

    def explain(self, error: BaseException) -> PeerFailure:
        """Returns the error to raise instead of `error`, a broken connection: it names the first cause. Takes up to 3 seconds."""
        if self._store is None:
            return PeerFailure(f"a connection broke: {error}")
        where = hang_report.place(list(hang_report.frames_of(error.__traceback__))[::-1])
        try:
            note = self._known or self._within(4 * self._interval + _NOTE_SECONDS, self._cause)
        except TimeoutError:
            note = {"message": self._cut(), "code": 5}
        except RuntimeError:
            note = self._known or {"message": _STORE_GONE, "code": 5}
        hints = "".join(f"; {hint}" for hint in getattr(error, "__notes__", ()))
        return PeerFailure(
            f"{note['message']}. Rank {self.rank} of {self.size} waited for it in {self.doing}, {where}; start the run again: "
            f"it resumes from its newest checkpoint{hints}",
            note["code"],
        )

    def _within(self, seconds: float, call: Callable[[], T]) -> T:
        """Returns the result of a call of the store.

        Raises:
            TimeoutError: there is none after `seconds`.
            RuntimeError: the store is gone.
        """
        results: list[T] = []
        errors: list[RuntimeError] = []

        def run() -> None:
            try:
                results.append(call())
            except RuntimeError as error:
                errors.append(error)

        began = time.monotonic()
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(seconds)
        if errors:
            raise errors[0]
        if not results:
            self._is_cut, self._unanswered = True, max(self._unanswered, time.monotonic() - began)
            raise TimeoutError
        return results[0]

    def _watch_store(self) -> None:
        """Reports a look of the other thread that does not end, and ends this process if it takes too long."""
        look, told = -1, self.patience
        while not self._done.wait(self._interval):
            if not self._looking or self._looks != look:
                look, told, self._unanswered = self._looks, self.patience, 0.0
                continue
            self._unanswered += self._interval  # counted, so that a process that was stopped is not late
            if self._unanswered > self._left and not self._done.wait(self._grace):
                self._leave(self._cut())
            if self._unanswered > told:
                told *= 2
                _log.warning("%s; rank %d is in %s", self._cut(), self.rank, self.doing)

    def _cut(self) -> str:
        return _CUT.format(host=self.host, at=self.at, seconds=self._unanswered, own=socket.gethostname())

    def _cause(self) -> dict[str, Any]:
        """Returns the first note; if there is none, one rank finds out the cause and leaves a note."""
        turn, pause = self._turn("turn/cause", self._interval), self._interval / 10
        while not (note := self._note()) and not turn.mine():
            time.sleep(pause)
            pause = min(1.5 * pause, self._interval / 2)
        if note:
            return note
        first, moved = self._sights(), set[int]()
        deadline = time.monotonic() + 3 * self._interval
        while len(moved) < len(first) or len(first) < self.size - 1:
            if note := self._note():
                return note
            if time.monotonic() > deadline:
                break
            time.sleep(self._interval / 10)
            turn.mine()
            moved |= {rank for rank, sight in self._sights().items() if rank not in first or sight.beat != first[rank].beat}
        now = self._sights()
        unmoved = [rank for rank in range(self.size) if rank not in moved and rank != self.rank]
        gone = [now.get(rank) or f"rank {rank} (no status received)" for rank in unmoved]
        if gone:
            message = f"{several(gone)} ended without a message: killed, out of memory or stopped, or its host is cut off"
        elif guilty := hang_report.late(now) if now else ():  # this rank has stopped waiting
            return self._leave_note(f"{several(guilty)} did not come within {self.timeout:g} s", 5, hangs=True)
        else:
            message = "the connection to another rank broke, but all ranks still run; check the network"
        return self._leave_note(message, 5)

    def _run(self) -> None:
        cause = None
        while cause is None:
            self._looks, self._looking = self._looks + 1, True
            try:
                cause = self._look()
            except RuntimeError:  # do not try again: torch prints a page to the terminal every time
                cause = _STORE_GONE
            self._looking = False
            if cause is None and self._done.wait(self._interval):
                return
        if not self._done.wait(self._grace):  # this process may be ending by itself, with a better message
            self._leave(f"the others have given up: {cause}")

    def _look(self) -> str | None:
        """Publishes one status. Returns why this process has to end; None if it need not."""
        now = time.monotonic()
        self._awake += min(now - self._woke, 2 * self._interval)
        self._woke = now
        status = self._sight()
        left = self.timeout if status.limit is None else status.limit - status.held
        self._left = max(left, self._grace)
        self._end_without_lock(self._left + 2 * self._grace)
        self._beat += 1
        self._store.set(f"rank/{self.rank}", json.dumps(status._replace(beat=self._beat)))
        if (note := self._note()) is not None:
            self._store.set(f"read/{self.rank}", "")
            self._end_without_lock(_LAST_SECONDS + 2 * self._grace)
            return note["message"]
        if (cause := self._hang(status)) is not None:
            self._end_without_lock(_LAST_SECONDS + 2 * self._grace)
            return self._leave_note(cause, 5, hangs=True)["message"]
        if status.waits and status.seconds > self.patience / 2:
            self._tell(status, now)
        else:
            self._reading.leave()
        return None

    def _tell(self, status: RankStatus, now: float) -> None:
        """Logs for whom this rank waits, after `patience` and each time the wait has doubled. One rank reads for all."""
        if self._reading.mine() and now - self._read_at > self.patience / 4:
            again, self._read_at = now - self._read_at < self.patience, now
            late = self._late_of_all(self._sights(), status)
            if again:  # a rank counts as alive only if its status changes between two looks
                self._publish(late)
        if self._told == 0:
            self._told, self._before = self.patience / 2, self._published()
        elif status.seconds > 2 * self._told and (found := self._published()) != self._before and found is not None:
            self._told, self._before = 2 * self._told, found
            others = [text for rank, text in found["ranks"] if rank != self.rank]
            if others:
                count = found["count"] - len(found["ranks"]) + len(others)
                guilty = several(others, count)
                _log.warning("waiting for %.0f s in %s, %s, for %s", status.seconds, status.doing, status.where, guilty)

    def _publish(self, late: "Sequence[RankStatus | str]") -> None:
        """Publishes which ranks the others wait for, with texts of as many as a message shows."""
        self._readings += 1
        named = [(each.rank if isinstance(each, RankStatus) else None, str(each)) for each in late[: hang_report.RANKS_SHOWN + 1]]
        record = {"by": self.rank, "reading": self._readings, "count": len(late), "ranks": named}
        self._store.set("late", json.dumps(record))

    def _published(self) -> dict[str, Any] | None:
        return json.loads(self._store.get("late")) if self._store.check(["late"]) else None

    def _end_without_lock(self, seconds: float) -> None:
        """Lets a C thread end this process after `seconds`, even if the interpreter lock is never released."""
        if self._file is not None:
            faulthandler.dump_traceback_later(seconds, exit=True, file=self._file)

    def _hang(self, status: RankStatus) -> str | None:
        """Returns which ranks hang and for how long; None if no rank does, or if the awaited ranks are within their limits.

        This takes two looks at the others: a rank counts as alive only if its status changes between them.
        """
        if status.waits and status.seconds > self.timeout:
            if not self._giving_up.mine():  # another rank is about to leave the note
                return None
            return f"{several(self._late(self._sights()))} did not come within {self.timeout:g} s"
        if not status.is_over or not self._judging.mine():
            self._suspected = False
            return None
        seen = self._sights()
        if not self._suspected:
            self._suspected, self._suspect_at = True, self._awake + self._quiet + 2 * self._interval
        if self._awake < self._suspect_at:
            return None
        self._suspect_at = self._awake + self._quiet
        guilty = self._late(seen)
        alive = [sight for sight in guilty if isinstance(sight, RankStatus) and not self._is_quiet(sight.rank)]
        if not guilty or any(not sight.is_over for sight in alive):
            return None
        return f"{several(guilty)} did not come within {status.limit:.4g} s"

    def _leave(self, cause: str) -> None:
        """Logs a last message and ends this process, whose training thread hangs."""
        status = self._sight()
        message = (
            f"{cause}. This rank has been in {status.doing}, {status.where}, for "
            f"{status.seconds:.0f} s; its stacks are in its log"
        )
        # The hanging thread may hold the lock of a log or of the terminal.
        words = threading.Thread(target=lambda: _log.error("%s", message), daemon=True)
        words.start()
        words.join(2)
        if self._file is not None:
            faulthandler.dump_traceback(self._file, all_threads=True)
        os._exit(5)

    def _note(self) -> dict[str, Any] | None:
        """Returns the first note if another rank has left one. It is cached, because the store may end with that rank."""
        if self._known is None and self._store.check(["ended"]):
            note = json.loads(self._store.get("ended"))
            self._known = None if note["rank"] == self.rank else note
            if self._known is not None and note["hangs"]:
                hang_report.answer(self._store, self.rank, self._story())
        return self._known

    def _story(self) -> str:
        return f"{self._sight()}\n{hang_report.stacks_of_all_threads()}"

    def _wait_until_read(self) -> None:
        """Waits until every other rank has read the note or has stopped publishing its status; at most ten seconds."""
        before, began = self._sights(), time.monotonic()
        keys = {f"read/{rank}": rank for rank in range(self.size) if rank != self.rank}
        left = list(keys)
        while left and time.monotonic() - began < _READ_SECONDS:
            time.sleep(self._interval / 5)
            left = absent(self._store, left)
            if time.monotonic() - began > max(3 * self._interval, 2.0):
                now = self._sights()
                ended = {rank for rank, sight in before.items() if now[rank].beat == sight.beat}
                left = [key for key in left if keys[key] not in ended]

    def _leave_note(self, message: str, code: int, hangs: bool = False) -> dict[str, Any]:
        """Returns the note that counts: this one, or an earlier one. After a hang, the first rank then writes the report."""
        own = json.dumps({"rank": self.rank, "message": message, "code": code, "hangs": hangs})
        note = json.loads(self._store.compare_set("ended", "", own))
        if note["rank"] != self.rank:  # another rank was faster, and waits for this rank's part of the report
            return self._note() or note
        if hangs:
            with contextlib.suppress(OSError):
                self._report(message)
        return note

    def _report(self, cause: str) -> None:
        """Writes the report of all ranks, collected for at most three seconds, or the last status of ranks that do not answer."""
        if self._folder is None:
            return
        last = {rank: "\n  ".join([f"silent; last status: {sight}", *sight.stack]) for rank, sight in self._sights().items()}
        others = {rank: last.get(rank, "no status received") for rank in range(self.size) if rank != self.rank}
        reports, records = hang_report.answers(self._store, others, max(3 * self._interval, 2.0))
        reports[self.rank], records[self.rank] = self._story(), hang_report.collectives()
        path = self._folder / HANGS
        hang_report.append(path, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), hang_report.text(cause, reports, records))
        _log.error("the stacks of all ranks are in %s", path)

    def _sights(self) -> dict[int, RankStatus]:
        """Returns the published status of the other ranks; ranks without one are left out."""
        unknown = {f"rank/{rank}": rank for rank in range(self.size) if rank != self.rank and rank not in self._publishing}
        missing = set(absent(self._store, list(unknown)))
        self._publishing |= {rank for key, rank in unknown.items() if key not in missing}
        known = sorted(self._publishing)
        texts = values(self._store, [f"rank/{rank}" for rank in known])
        sights = {rank: RankStatus(*json.loads(text)) for rank, text in zip(known, texts, strict=True)}
        now = time.monotonic()
        for rank, sight in sights.items():
            if self._heard.get(rank, (None, 0.0))[0] != sight.beat:
                self._heard[rank] = sight.beat, now
        return sights

    def _late(self, seen: dict[int, RankStatus]) -> "Sequence[RankStatus | str]":
        """Returns the ranks that the others wait for, including this one if it does not wait. See `hang_report.late`."""
        own = self._sight()
        late = self._late_of_all(seen, own)
        return [status for status in late if status != own] if own.waits else late

    def _late_of_all(self, seen: dict[int, RankStatus], own: RankStatus) -> "Sequence[RankStatus | str]":
        """Returns the ranks that the others wait for, including this one."""
        now = time.monotonic()
        silent = [
            seen[rank]._replace(silent=now - self._heard[rank][1]) if rank in seen else f"rank {rank} (no status received)"
            for rank in range(self.size)
            if self._is_quiet(rank)
        ]
        return hang_report.late({self.rank: own, **seen}, silent)

    def _is_quiet(self, rank: int) -> bool:
        """Whether another rank has stopped publishing its status."""
        return rank != self.rank and time.monotonic() - self._heard.get(rank, (0, -math.inf))[1] > self._quiet

    @property
    def _quiet(self) -> float:
        return max(5 * self._interval, self.patience / 4)

    def _turn(self, key: str, seconds: float) -> ReadingTurn:
        return ReadingTurn(self._store, key, self.rank, seconds)

    def _sight(self) -> RankStatus:
        """Returns this rank's status; `seconds` counts from when the training thread was first seen at its current line."""
        passed, doing, section, held = self.passed, self.doing, self.section, self._awake - self._entered
        stack = list(hang_report.outwards(hang_report.frames_of_threads().get(self._main)))
        mark = (passed, *((id(frame), frame.f_lasti) for frame in stack[:1]))
        if mark != self._mark:
            self._mark, self._since, self._told = mark, self._awake, 0.0
        limit = self.limits.of(section, self.timeout) if section and not hang_report.is_debugged(stack) else None
        here = hang_report.place(stack), self._awake - self._since, hang_report.is_waiting(stack)
        return RankStatus(
            self.rank, self._who, self._beat, passed, doing, *here, held, limit, hang_report.places(stack), self.calls
        )
