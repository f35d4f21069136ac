"""Local ranks of `forge-train run --processes`: how they start and end, restart after failures, and stop without progress.

After a failure that a restart may cure, all ranks restart from the newest verified checkpoint. If the rank at one place fails
twice in a row, or its device disappears, the next start uses fewer ranks. A place is the number of a local device on which a
rank runs; the recipe determines how many of the remaining places a job can use.

A run that restarts repeatedly without a newer checkpoint needs a person. A file in the run's directory counts the automatic
restarts from the same checkpoint, under every launcher; a manual start, or a start from another checkpoint, resets the count.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from forge_core.errors import ConfigError, ForgeError
from forge_core.registry import Registry
from forge_parallel.launch.environment import DEVICE, read_launcher
from forge_train.directory import NO_PROGRESS_FILE, RESTARTS_FILE
from forge_train.process.stop import FAULTY, FOLLOWS, FULL, heard
from forge_train.recipe.load import load_recipe

MOST_RESTARTS = 3

NONE_GONE = 0
"""Device count of a machine without accelerators, or whose accelerators cannot be counted."""

AGAIN = (1, FOLLOWS, FAULTY, FULL)
"""Exit codes after which ranks restart, in addition to unexpected signals: an error of the program, the loss of another rank, a
fault of the machine, and a step that ran out of memory and will use smaller micro-batches. After other codes, a restart would end
the same way, or the user requested the end."""

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable with the file that torchrun shows in its summary; torchrun's own exit code is 1 for any failure."""

_START_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
_COUNT_DEVICES = "from forge_parallel import accelerator; print(accelerator.count())"
_COUNT_SECONDS = 120.0
_LOOK_SECONDS = 0.05
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of linux/prctl.h


@dataclass(frozen=True)
class Machines:
    """The machines of a job on each of which another program, such as Kubernetes, starts this launcher.

    Attributes:
        count: number of machines; each has the same number of ranks.
        number: number of this machine, from 0.
        address: host of rank 0, which is on machine 0.
        port: port of rank 0.
        attempt: number of earlier starts of the job.
    """

    count: int = 1
    number: int = 0
    address: str = "127.0.0.1"
    port: int = 0
    attempt: int = 0


def supervised(
    recipe: str,
    overrides: Sequence[str],
    fresh: bool,
    processes: int,
    restarts: int,
    least: int | None,
    machines: Machines | None = None,
    say: Callable[[str], object] | None = None,
) -> int:
    """Starts the ranks of this machine, restarts them when they fail, and returns the exit code.

    Args:
        least: minimum number of ranks with which the run continues if a place is lost; None starts all ranks each time.
        machines: the other machines of the job; None if all ranks are on this one.
        say: reports failures and restarts; the default prints them on standard error.

    Raises:
        ForgeError: options that contradict each other or the environment.
    """
    if (launcher := read_launcher(os.environ).launcher) != "none":
        raise ForgeError(
            f"--processes and --restarts start processes, but {launcher} has already done so; remove these options or {launcher}"
        )
    if fresh and restarts > 0:
        raise ForgeError("--fresh with --restarts would start over after a failure; start over without --restarts")
    if machines is not None and (restarts > 0 or least is not None):
        raise ForgeError("ranks on several machines must restart together: remove --restarts and --min-processes")
    fewer = None
    if least is not None:
        if restarts == 0:
            raise ForgeError("--min-processes has no effect without restarts: set --restarts, or remove it")
        if least >= processes:
            raise ForgeError(
                f"--min-processes = {least} is not below --processes = {processes}: set a smaller number, or remove it"
            )
        fewer = Fewer(least, lambda size: unfit(recipe, overrides, size), devices, blameless=(FOLLOWS, FULL))
        size, why = fewer.largest(processes)
        if not size:
            raise ForgeError(f"--min-processes = {least}: no number of ranks below {processes} fits this recipe; {why}")
    signals, command = Passed(), [sys.executable, "-m", "forge_train", "run", recipe, *["--fresh"] * fresh, *overrides]

    with heard(signals.note):
        return supervise(command, processes, restarts, say or _print, signals, fewer=fewer, machines=machines)


def unfit(recipe: str, overrides: Sequence[str], size: int) -> str:
    """Returns why a run cannot continue with `size` ranks; empty if it can, with the same losses."""
    try:
        job = load_recipe(recipe, overrides, size, Registry()).job
    except ForgeError as refusal:
        return "; ".join(map(str, refusal.faults)) if isinstance(refusal, ConfigError) else str(refusal)
    depends = getattr(job.model, "layout_dependent", ())
    return f"the effect of {', '.join(depends)} depends on the number of ranks" if depends else ""


def devices() -> int:
    """Returns the number of accelerators that a new process finds on this machine; `NONE_GONE` if there are none or it fails."""
    try:
        counted = subprocess.run([sys.executable, "-c", _COUNT_DEVICES], capture_output=True, text=True, timeout=_COUNT_SECONDS)
        return int(counted.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return NONE_GONE


def _print(line: str) -> None:
    sys.stderr.write(f"{line}\n")


@dataclass(frozen=True)
class Ended:
    """How the ranks ended.

    Attributes:
        code: exit code of the first rank that failed, negative for a signal; 0 if no rank failed.
        why: the first failure, with its rank; empty if no rank failed.
        rank: the first rank that failed; -1 if no rank failed.
    """

    code: int
    why: str = ""
    rank: int = -1


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


def supervise(
    command: Sequence[str],
    size: int,
    restarts: int,
    say: Callable[[str], object],
    signals: Passed | None = None,
    grace: float = 8.0,
    fewer: Fewer | None = None,
    machines: Machines | None = None,
) -> int:
    """Runs ranks and restarts them after failures; returns the exit code of the last start. Reports the cause of each failure.

    A rank that was ended by a signal counts as lost: exit code 5.

    Args:
        command: command of every rank.
        size: number of ranks.
        restarts: maximum number of restarts.
        say: prints a message.
        signals: stop signals; after one of them, ranks are not restarted.
        grace: see `run_local_ranks`.
        fewer: chooses smaller numbers of ranks after failures; without it, all ranks are started each time.
        machines: see `run_local_ranks`.
    """
    signals = signals or Passed()
    life, places = 0, list(range(size))
    while True:
        ended = run_local_ranks(command, places, life, grace, signals, machines)
        code = FOLLOWS if ended.code < 0 else ended.code
        if code not in AGAIN or signals.any:
            return code
        if life >= restarts:
            left = "" if machines is not None else f"; no restarts left (maximum {restarts})"
            say(f"{ended.why}{left}")
            return code
        life += 1
        say(f"{ended.why}; restart {life} of {restarts}, from the newest verified checkpoint")
        if fewer is not None:
            places, told = fewer.after(ended, places)
            if told:
                say(told)


def run_local_ranks(
    command: Sequence[str],
    places: Sequence[int],
    life: int = 0,
    grace: float = 8.0,
    signals: Passed | None = None,
    machines: Machines | None = None,
) -> Ended:
    """Runs a command on one local rank per place until all ranks have ended; kills the others some time after one has failed.

    Works for any program that reads torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR, ...). As under torchrun, a rank may
    write the cause of its end to the file in TORCHELASTIC_ERROR_FILE. Ranks die with this process, however it ends.

    Args:
        command: command of every rank.
        places: local device number of each rank: 0, 1, 2, ... if all devices are used. Each rank reads its own from `DEVICE`.
        life: number of earlier starts of these ranks.
        grace: seconds between the first failure of a rank and killing the others.
        signals: stop signals, which are passed on to all ranks.
        machines: the other machines of the job, with as many ranks each; None if there are none.
    """
    job = machines or Machines(port=_free_port())
    first_rank = job.number * len(places)
    common = {"WORLD_SIZE": str(job.count * len(places)), "LOCAL_WORLD_SIZE": str(len(places))}
    common |= {"MASTER_ADDR": job.address, "MASTER_PORT": str(job.port), "TORCHELASTIC_RESTART_COUNT": str(job.attempt + life)}
    with tempfile.TemporaryDirectory(prefix="forge-ranks-") as folder:
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank, place in enumerate(places):
                own = {"RANK": str(first_rank + rank), "LOCAL_RANK": str(rank), DEVICE: str(place)}
                own[ERROR_FILE] = f"{folder}/error-{rank}"
                variables = {**os.environ, **common, **own}
                ranks.append(subprocess.Popen(command, env=variables, preexec_fn=dies_with_parent()))
            order = _wait(ranks, grace, signals or Passed())
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        codes = {rank: code for rank in order if (code := ranks[rank].returncode) != 0}
        if not codes:
            return Ended(0)
        first = next((rank for rank, code in codes.items() if code != FOLLOWS), next(iter(codes)))
        cause = cause_of_end(Path(folder, f"error-{first}")) or _without_message(codes[first])
        return Ended(codes[first], f"rank {first_rank + first} {cause}", first)


def _wait(ranks: "Sequence[subprocess.Popen[bytes]]", grace: float, signals: Passed) -> list[int]:
    """Waits for the ranks; returns those that were not killed, in the order in which they ended."""
    order: list[int] = []
    deadline = None
    while len(order) < len(ranks) and (deadline is None or time.monotonic() <= deadline):
        for rank, process in enumerate(ranks):
            if rank not in order and process.poll() is not None:
                order.append(rank)
                if process.returncode != 0 and deadline is None:
                    deadline = time.monotonic() + grace
        for number in signals.take():
            for process in ranks:
                process.send_signal(number)
        time.sleep(_LOOK_SECONDS)
    return order


def _without_message(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code} without a message"


def cause_of_end(path: Path) -> str:
    """Returns the message that a rank wrote for its launcher; empty if there is none."""
    try:
        return str(json.loads(path.read_text())["message"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def dies_with_parent() -> Callable[[], None] | None:
    """Returns a function that makes a new process die with this one, however this one ends; None if not on Linux."""
    if not sys.platform.startswith("linux"):
        return None
    import ctypes

    library, parent = ctypes.CDLL(None, use_errno=True), os.getpid()

    def bind() -> None:
        library.prctl(_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before prctl took effect
            os._exit(FOLLOWS)

    return bind


class NoProgress(ForgeError):
    """The run was restarted too often without a newer checkpoint. A scheduler must not restart it again."""

    exit_code = 93


def is_automatic(environment: Mapping[str, str]) -> bool:
    """Returns True if a launcher or a scheduler has started this job before."""
    return any(environment.get(name, "0") not in ("", "0") for name in _START_COUNTS)


def restarts_before(directory: Path, step: int) -> int:
    """Returns the recorded number of automatic restarts from the checkpoint of this step, or from step 0."""
    try:
        record = json.loads((directory / RESTARTS_FILE).read_text())
        return int(record["restarts"]) if record["step"] == step else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def refuse_without_progress(directory: Path, step: int, automatic: bool, most: int = MOST_RESTARTS) -> None:
    """Refuses one automatic restart too many from the same checkpoint, and writes the reason to `NO_PROGRESS_FILE`.

    Args:
        directory: directory of the run.
        step: step of the checkpoint that the run resumes from; 0 without one.
        automatic: True if a launcher or a scheduler restarts the run.
        most: maximum number of automatic restarts from one step.

    Raises:
        NoProgress: there were already `most` automatic restarts from this step.
    """
    if not automatic or (before := restarts_before(directory, step)) < most:
        return
    where = f"the checkpoint of step {step}" if step else "step 0"
    text = (
        f"the run in {directory} was restarted {before} times from {where}, and ended each time before a newer checkpoint: "
        f"it is not restarted automatically again. Look at the ends of its logs; start it by hand to continue"
    )
    (directory / NO_PROGRESS_FILE).write_text(text + "\n")
    raise NoProgress(text)


def note_start(directory: Path, step: int, automatic: bool) -> None:
    """Counts a start in the run's directory, after the run has taken the directory over.

    Raises:
        OSError: the file cannot be written.
    """
    restarts = restarts_before(directory, step) + 1 if automatic else 0
    new = directory / f".{RESTARTS_FILE}"
    new.write_text(json.dumps({"step": step, "restarts": restarts}))
    new.replace(directory / RESTARTS_FILE)
    (directory / NO_PROGRESS_FILE).unlink(missing_ok=True)
