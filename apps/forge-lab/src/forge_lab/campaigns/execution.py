"""Runs entries on this machine, one after the other, each in processes of its own that end with its time limit."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from forge_core.machine import usable_cores
from forge_core.terminal import duration, size
from forge_lab.campaigns.campaign import Campaign, CampaignEntry
from forge_lab.campaigns.records import OUTPUT, RECIPE_FILE, Attempt, fingerprint_of, prepare_entry, write_attempt, writing
from forge_lab.sweep.execution import StopRequests
from forge_lab.sweep.processes import command_of
from forge_train.process.restarts import dies_with_parent

_LOOK_SECONDS = 0.05
_SAY_EVERY = 30.0
GRACE_SECONDS = 10.0
"""Seconds that a run has to end after a stop signal; then its processes are killed."""
_BUSY = 0.5
"""Load average per core above which a machine counts as busy."""
_STATE_BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}


@dataclass(frozen=True)
class BoundedEnd:
    """How a bounded process ended.

    Attributes:
        code: exit code, negative for a signal.
        seconds: from start to end.
        timed_out: whether it was killed at its time limit.
        stopped: whether it was asked to stop because this process was.
    """

    code: int
    seconds: float
    timed_out: bool = False
    stopped: bool = False


class RunBounded(Protocol):
    """Runs a command with a time limit; appends its output to a file."""

    def __call__(
        self, command: Sequence[str], output: Path, limit: float, asked: StopRequests, look: Callable[[], None]
    ) -> BoundedEnd: ...


def run_bounded(
    command: Sequence[str], output: Path, limit: float, asked: StopRequests, look: Callable[[], None] = lambda: None
) -> BoundedEnd:
    """Runs a command in a process group of its own, which is killed at the time limit and after the command has ended.

    The command also dies with this process, however this one ends.

    Args:
        command: the command.
        output: file to which its output is appended.
        limit: seconds after which the group is killed.
        asked: stop requests; the first one is passed on as SIGTERM; after `GRACE_SECONDS`, or a second one, the group is killed.
        look: called from time to time.
    """
    begun = time.monotonic()
    with output.open("ab") as file:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=dies_with_parent(),
        )
    timed_out, told = False, 0.0
    try:
        while not _has_ended(process):
            now = time.monotonic()
            if now - begun > limit:
                timed_out = True
                break
            if asked.times and not told:
                told = now
                process.send_signal(signal.SIGTERM)
            if told and (asked.times > 1 or now - told > GRACE_SECONDS):
                break
            look()
            time.sleep(_LOOK_SECONDS)
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    return BoundedEnd(code, time.monotonic() - begun, timed_out, told > 0)


def _has_ended(process: "subprocess.Popen[bytes]") -> bool:
    """Whether a process has ended. Where the system can tell without reaping it, its number stays taken, so the group that is
    killed afterwards is its group and no other."""
    if not hasattr(os, "waitid"):
        return process.poll() is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def oom_kills() -> int | None:
    """Returns the number of processes that the kernel has killed for lack of memory since it started; None if unknown."""
    try:
        lines = Path("/proc/vmstat").read_text().split("\n")
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)


@dataclass
class LocalRunner:
    """Runs entries on this machine.

    Attributes:
        campaign: the campaign.
        say: called with a line about each start and end.
        accelerators: number of accelerators of this machine.
        memory: bytes of host memory that a process may use now; None if unknown.
        asked: stop requests of this process.
        begin: runs one command.
    """

    campaign: Campaign
    say: Callable[[str], None]
    accelerators: int
    memory: int | None
    asked: StopRequests = field(default_factory=StopRequests)
    begin: RunBounded = run_bounded
    not_run: dict[str, str] = field(default_factory=dict)

    def run(self, entries: Sequence[CampaignEntry]) -> None:
        """Runs entries until the last one has ended, or until this process is asked to stop.

        Entries that this machine cannot run are in `not_run` afterwards, with the reason.

        Raises:
            ForgeError: the directory cannot be written.
        """
        if (load := os.getloadavg()[0]) > _BUSY * usable_cores():
            self.say(
                f"warning: other programs use this machine (load average {load:.1f}, {usable_cores()} cores): times may be long"
            )
        for count, entry in enumerate(entries, 1):
            if self.asked.times:
                return
            if entry.recipe is not None and (why := self._unfit(entry)):
                self.not_run[entry.name] = why
                self.say(f"[{count}/{len(entries)}] {entry.name}: not run, {why}")
                continue
            prepare_entry(self.campaign, entry, entry.world)
            if entry.recipe is None:
                self.say(f"[{count}/{len(entries)}] {entry.name}: refused")
                continue
            self._run(entry, f"[{count}/{len(entries)}] {entry.name}")

    def _run(self, entry: CampaignEntry, title: str) -> None:
        folder, limit = self.campaign.folder(entry), 60.0 * self.campaign.settings.limit_minutes
        self.say(f"{title}: started on {entry.world} rank{'s' if entry.world > 1 else ''}, at most {duration(limit)}")
        killed, began, since = oom_kills(), datetime.now(UTC), time.monotonic()
        said = [since]

        def look() -> None:
            if time.monotonic() - said[0] > _SAY_EVERY:
                said[0] = time.monotonic()
                self.say(f"{title}: running for {duration(said[0] - since)}")

        with writing(self.campaign.directory):
            command = command_of(["run", str(folder / RECIPE_FILE)], entry.world)
            ended = self.begin(command, folder / OUTPUT, limit, self.asked, look)
            if ended.stopped:  # not a result: the entry runs again
                self.say(f"{title}: interrupted")
                return
            now = oom_kills()
            attempt = Attempt(
                fingerprint_of(entry),
                ended.code,
                round(ended.seconds, 2),
                began.isoformat(timespec="seconds"),
                limit,
                ended.timed_out,
                None if killed is None or now is None else now - killed,
            )
            write_attempt(folder, attempt)

    def _unfit(self, entry: CampaignEntry) -> str:
        """Returns why this machine cannot run an entry; empty if it may.

        Without accelerators, all ranks share the host's memory, and the kernel might kill other programs for it.
        """
        if 0 < self.accelerators < entry.world:
            return f"it needs {entry.world} accelerators, and this machine has {self.accelerators}"
        if self.accelerators or self.memory is None or entry.recipe is None:
            return ""
        from forge_train.plan import run_size

        job = entry.recipe.job
        least = 2 * _STATE_BYTES[job.precision.state] * run_size(job).parameters
        if least > self.memory:
            have = f"this machine has no accelerator and {size(self.memory)} of memory left"
            return f"its weights and gradients take {size(least)}, and {have}"
        return ""


def wanted(entries: Sequence[CampaignEntry], statuses: Mapping[str, str], retry: Sequence[str]) -> list[CampaignEntry]:
    """Returns the entries to run: those without a result, refused ones, and those with a status to try again.

    Args:
        entries: chosen entries of the campaign.
        statuses: status of each entry by name.
        retry: statuses to try again, or `all`.
    """
    again = {"waiting", "refused", *retry}
    return [entry for entry in entries if "all" in retry or statuses[entry.name] in again]
