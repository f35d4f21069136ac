"""`forge-train run --processes --restarts --min-processes`: the ranks of this machine, without another launcher."""

import os
import subprocess
import sys
from collections.abc import Sequence

from forge_ckpt.resilience.fewer import NONE_GONE, Fewer
from forge_ckpt.resilience.local_ranks import FOLLOWS
from forge_ckpt.resilience.restarts import FULL, Passed, supervise
from forge_core.errors import ConfigError, ForgeError
from forge_core.registry import Registry
from forge_core.terminal import Console
from forge_parallel.launch.environment import read_launcher
from forge_train.process.stop import heard
from forge_train.recipe.load import load

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
