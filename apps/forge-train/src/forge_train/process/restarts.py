"""`forge-train run --processes --restarts --min-processes`: starts the ranks of this machine, also again after failures.

After a failure that another start may mend, all ranks are started again from the newest verified checkpoint. Where one place of
the machine fails twice in a row, or its device is gone, the next start uses fewer ranks. A place is what a rank runs on, by the
number of its local device; how many of the places that are left a job can use, only the job can say.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType

from forge_core.errors import ConfigError, ForgeError
from forge_core.registry import Registry
from forge_core.terminal import Console
from forge_parallel.launch.environment import read_launcher
from forge_train.process.local_ranks import Ended, run_local_ranks
from forge_train.process.stop import FAULTY, FOLLOWS, FULL, heard
from forge_train.recipe.load import load

NONE_GONE = 0
"""Of devices: there are none on this machine, or it could not be asked."""


@dataclass
class Fewer:
    """Chooses the places of the next start.

    Args:
        least: ranks, below which nothing is started.
        fits: why a job cannot run on so many ranks; empty where it can.
        devices: how many this machine shows now; `NONE_GONE` where ranks use none.
        blameless: exit codes of a rank that say nothing about its place.
    """

    least: int
    fits: Callable[[int], str]
    devices: Callable[[], int] = lambda: NONE_GONE
    blameless: Sequence[int] = (FOLLOWS,)
    _blamed: int | None = field(default=None, init=False)

    def largest(self, below: int) -> tuple[int, str]:
        """The largest number of ranks from `least` to `below` - 1 that fits; 0 and why none does."""
        why: list[str] = []
        for size in range(below - 1, self.least - 1, -1):
            if not (refusal := self.fits(size)):
                return size, ""
            why.append(f"with {size}: {refusal}")
        return 0, "; ".join(why) or f"{below} ranks cannot get fewer"

    def after(self, ended: Ended, places: Sequence[int]) -> tuple[list[int], str]:
        """The places of the next start, and what to say where they are others.

        Args:
            ended: how the ranks at `places` ended.
        """
        there = self.devices()
        if NONE_GONE < there <= max(places):
            self._blamed = None
            left = list(range(there))
            return self._chosen(left, places, f"this machine shows {there} device{'s' if there > 1 else ''} now")
        place = places[ended.rank] if 0 <= ended.rank < len(places) and ended.code not in self.blameless else None
        again, self._blamed = place is not None and place == self._blamed, place
        if not again:
            return list(places), ""
        self._blamed = None
        left = [other for other in places if other != place]
        return self._chosen(left, places, f"the rank at local place {place} failed twice in a row")

    def _chosen(self, left: Sequence[int], places: Sequence[int], why: str) -> tuple[list[int], str]:
        size, refusal = self.largest(len(left) + 1)
        if not size:
            return list(places), f"{why}, and no smaller number of ranks from {self.least} on fits: {refusal}"
        chosen = list(left[:size])
        listed = ", ".join(map(str, chosen))
        return chosen, f"{why}: going on with {size} of {len(places)} ranks, at local places {listed}"


AGAIN = (1, FOLLOWS, FAULTY, FULL)
"""Exit codes after which ranks are started again, besides every signal that they did not ask for: a fault of the program, the
loss of another rank, one of the machine, and a step that did not fit and will be cut into smaller parts. Others say that the same
would happen again, or that the end was asked for."""


class Passed:
    """Signals that this process gets and its ranks have to get: those that ask for an end."""

    def __init__(self) -> None:
        self.any = False
        self._new: list[int] = []

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler."""
        self.any = True
        self._new.append(number)

    def take(self) -> list[int]:
        """Those since the last call."""
        taken, self._new = self._new, []
        return taken


def supervise(
    command: Sequence[str],
    size: int,
    restarts: int,
    environment: Mapping[str, str],
    say: Callable[[str], None],
    signals: Passed | None = None,
    grace: float = 8.0,
    fewer: Fewer | None = None,
) -> int:
    """Runs ranks, and runs them again after a failure; the exit code of the last time. Each failure is said with its first cause.

    A rank that was ended by a signal counts as lost: exit code 5.

    Args:
        restarts: how often they are started again.
        signals: after one of them, nothing is started again.
        grace: see `local_ranks.run`.
        fewer: chooses smaller numbers of ranks after failures; without it, all are started each time.
    """
    signals = signals or Passed()
    life, places = 0, list(range(size))
    while True:
        ended = run_local_ranks(command, places, environment, life, grace, signals.take)
        code = FOLLOWS if ended.code < 0 else ended.code
        if code == 0 or signals.any or not _may_help(ended):
            return code
        if life >= restarts:
            say(f"{ended.why}; no restart is left of {restarts}")
            return code
        life += 1
        say(f"{ended.why}; restart {life} of {restarts}, from the newest verified checkpoint")
        if fewer is not None:
            places, told = fewer.after(ended, places)
            if told:
                say(told)


def _may_help(ended: Ended) -> bool:
    return ended.code < 0 or ended.code in AGAIN


_COUNT = "from forge_parallel import accelerator; print(accelerator.count())"
_COUNT_SECONDS = 120.0


def supervised(recipe: str, overrides: Sequence[str], fresh: bool, processes: int, restarts: int, least: int | None) -> int:
    """Starts the ranks of this machine, again when they fail; the exit code.

    Args:
        least: ranks with which the run may go on where a place of this machine is lost; None starts all of them each time.
    """
    if (launcher := read_launcher(os.environ).launcher) != "none":
        return _refused(f"--processes and --restarts start processes by themselves, and {launcher} has started this one")
    if fresh and restarts > 0:
        return _refused("--fresh with --restarts would start over after a failure; start over without --restarts")
    fewer = None
    if least is not None:
        if restarts == 0:
            return _refused("--min-processes says what a restart may do, and there is none: set --restarts")
        if least >= processes:
            return _refused(
                f"--min-processes = {least} is not below --processes = {processes}: set a smaller one, or leave it out"
            )
        fewer = Fewer(least, lambda size: unfit(recipe, overrides, size), devices, blameless=(FOLLOWS, FULL))
        size, why = fewer.largest(processes)
        if not size:
            return _refused(f"--min-processes = {least}: no number of ranks below {processes} fits this recipe; {why}")
    signals, command = Passed(), [sys.executable, "-m", "forge_train", "run", recipe, *["--fresh"] * fresh, *overrides]

    def say(line: str) -> None:
        sys.stderr.write(f"{line}\n")

    with heard(signals.note):
        return supervise(command, processes, restarts, os.environ, say, signals, fewer=fewer)


def unfit(recipe: str, overrides: Sequence[str], size: int) -> str:
    """Why a run may not go on with so many ranks; empty where its losses stay those of any other number."""
    try:
        job = load(recipe, overrides, size, Registry()).job
    except ForgeError as refusal:
        return "; ".join(map(str, refusal.faults)) if isinstance(refusal, ConfigError) else str(refusal)
    depends = getattr(job.model, "layout_dependent", ())
    return f"what {', '.join(depends)} does depends on the number of ranks" if depends else ""


def devices() -> int:
    """How many accelerators a new process finds on this machine; `NONE_GONE` where there are none or it cannot say."""
    try:
        asked = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, timeout=_COUNT_SECONDS)
        return int(asked.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return NONE_GONE


def _refused(why: str) -> int:
    Console().error(ForgeError(why))
    return ForgeError.exit_code
