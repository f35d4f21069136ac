"""`forge-train run --processes --restarts`: the ranks of this machine, without another launcher."""

import os
import sys
from collections.abc import Sequence

from forge_ckpt.resilience.restarts import Passed, supervise
from forge_core.errors import ForgeError
from forge_core.terminal.console import Console
from forge_parallel.launch.environment import read_launcher
from forge_train.process.stop import heard


def supervised(recipe: str, overrides: Sequence[str], fresh: bool, processes: int, restarts: int) -> int:
    """Starts the ranks of this machine, again when they fail; the exit code."""
    if (launcher := read_launcher(os.environ).launcher) != "none":
        return _refused(f"--processes and --restarts start processes by themselves, and {launcher} has started this one")
    if fresh and restarts > 0:
        return _refused("--fresh with --restarts would start over after a failure; start over without --restarts")
    signals, command = Passed(), [sys.executable, "-m", "forge_train", "run", recipe, *["--fresh"] * fresh, *overrides]

    def say(line: str) -> None:
        sys.stderr.write(f"{line}\n")

    with heard(signals.note):
        return supervise(command, processes, restarts, os.environ, say, signals)


def _refused(why: str) -> int:
    Console().error(ForgeError(why))
    return ForgeError.exit_code
