"""`forge-train run --processes --restarts --min-processes`: starts the ranks of this machine, and restarts them after failures.

After a failure that a restart may cure, all ranks restart from the newest verified checkpoint. If the rank at one place fails
twice in a row, or its device disappears, the next start uses fewer ranks. A place is the number of a local device on which a
rank runs; the recipe determines how many of the remaining places a job can use.
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
"""Device count of a machine without accelerators, or whose accelerators cannot be counted."""


@dataclass
class Fewer:
    """Chooses the places of the next start.

    Args:
        least: minimum number of ranks.
        fits: returns why the job cannot run on a number of ranks; empty if it can.
        devices: returns the number of devices that this machine has now; `NONE_GONE` if ranks use none.
        blameless: exit codes that are not caused by the rank's place.
    """

    least: int
    fits: Callable[[int], str]
    devices: Callable[[], int] = lambda: NONE_GONE
    blameless: Sequence[int] = (FOLLOWS,)
    _blamed: int | None = field(default=None, init=False)

    def largest(self, below: int) -> tuple[int, str]:
        """Returns the largest number of ranks from `least` to `below` - 1 that fits, or 0 and the reasons."""
        why: list[str] = []
        for size in range(below - 1, self.least - 1, -1):
            if not (refusal := self.fits(size)):
                return size, ""
            why.append(f"with {size}: {refusal}")
        return 0, "; ".join(why) or f"{below} ranks cannot be reduced further"

    def after(self, ended: Ended, places: Sequence[int]) -> tuple[list[int], str]:
        """Returns the places of the next start, and a message if they change.

        Args:
            ended: how the ranks at `places` ended.
            places: the places of the last start.
        """
        there = self.devices()
        if NONE_GONE < there <= max(places):
            self._blamed = None
            left = list(range(there))
            return self._chosen(left, places, f"this machine now has only {there} device{'s' if there > 1 else ''}")
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
            return list(places), f"{why}, but no smaller number of ranks, down to {self.least}, fits: {refusal}"
        chosen = list(left[:size])
        listed = ", ".join(map(str, chosen))
        return chosen, f"{why}: continuing with {size} of {len(places)} ranks, at local places {listed}"


AGAIN = (1, FOLLOWS, FAULTY, FULL)
"""Exit codes after which ranks restart, in addition to unexpected signals: an error of the program, the loss of another rank, a
fault of the machine, and a step that ran out of memory and will use smaller micro-batches. After other codes, a restart would end
the same way, or the user requested the end."""


class Passed:
    """Collects stop signals of this process, to pass them on to its ranks."""

    def __init__(self) -> None:
        self.any = False
        self._new: list[int] = []

    def note(self, number: int, frame: FrameType | None) -> None:
        """Records a signal; the signal handler."""
        self.any = True
        self._new.append(number)

    def take(self) -> list[int]:
        """Returns the signals since the last call."""
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
    """Runs ranks and restarts them after failures; returns the exit code of the last start. Reports the cause of each failure.

    A rank that was ended by a signal counts as lost: exit code 5.

    Args:
        command: command of every rank.
        size: number of ranks.
        restarts: maximum number of restarts.
        environment: environment variables of the ranks.
        say: prints a message.
        signals: stop signals; after one of them, ranks are not restarted.
        grace: see `run_local_ranks`.
        fewer: chooses smaller numbers of ranks after failures; without it, all ranks are started each time.
    """
    signals = signals or Passed()
    life, places = 0, list(range(size))
    while True:
        ended = run_local_ranks(command, places, environment, life, grace, signals.take)
        code = FOLLOWS if ended.code < 0 else ended.code
        if code == 0 or signals.any or not _may_help(ended):
            return code
        if life >= restarts:
            say(f"{ended.why}; no restarts left (maximum {restarts})")
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
    """Starts the ranks of this machine, restarts them when they fail, and returns the exit code.

    Args:
        least: minimum number of ranks with which the run continues if a place is lost; None starts all ranks each time.
    """
    if (launcher := read_launcher(os.environ).launcher) != "none":
        return _refused(
            f"--processes and --restarts start processes, but {launcher} has already done so; remove these options or {launcher}"
        )
    if fresh and restarts > 0:
        return _refused("--fresh with --restarts would start over after a failure; start over without --restarts")
    fewer = None
    if least is not None:
        if restarts == 0:
            return _refused("--min-processes has no effect without restarts: set --restarts, or remove it")
        if least >= processes:
            return _refused(
                f"--min-processes = {least} is not below --processes = {processes}: set a smaller number, or remove it"
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
    """Returns why a run cannot continue with `size` ranks; empty if it can, with the same losses."""
    try:
        job = load(recipe, overrides, size, Registry()).job
    except ForgeError as refusal:
        return "; ".join(map(str, refusal.faults)) if isinstance(refusal, ConfigError) else str(refusal)
    depends = getattr(job.model, "layout_dependent", ())
    return f"the effect of {', '.join(depends)} depends on the number of ranks" if depends else ""


def devices() -> int:
    """Returns the number of accelerators that a new process finds on this machine; `NONE_GONE` if there are none or it fails."""
    try:
        counted = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, timeout=_COUNT_SECONDS)
        return int(counted.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return NONE_GONE


def _refused(why: str) -> int:
    Console().error(ForgeError(why))
    return ForgeError.exit_code
