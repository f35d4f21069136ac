"""Parts of a recipe for jobs of a real SLURM: they ask their own job to stop at chosen moments of chosen starts, and wait."""

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_ckpt.store.local import LocalStore
from forge_core.component import Component
from forge_core.protocols.run import Hook

START = int(os.environ.get("SLURM_RESTART_COUNT", "0")) if "SLURM_JOB_ID" in os.environ else -1
"""Number of earlier starts of the job; -1 outside SLURM, where nothing happens."""

FIRST = os.environ.get("SLURM_PROCID", "0") == "0"
LONGEST_SECONDS = 150.0

asked: list[str] = []


def wait_for(reached: Callable[[], Any], what: str) -> None:
    until = time.monotonic() + LONGEST_SECONDS
    while not reached():
        if time.monotonic() > until:
            raise TimeoutError(what)
        time.sleep(0.05)


def ask_to_stop() -> None:
    """Lets SLURM send SIGTERM to all ranks of this job."""
    if FIRST:
        subprocess.run(["scancel", "--signal=TERM", os.environ["SLURM_JOB_ID"]], check=True, timeout=60)


class _Moments(Hook):
    def before_step(self, run: Any) -> None:
        if (START, run.state.step) in ((1, 2), (3, 8)):
            asked.append("in a step")
            ask_to_stop()
            wait_for(lambda: run.stop.signals.asked, "SIGTERM in a step")


@dataclass(frozen=True, kw_only=True)
class Moments(Component):
    """SIGTERM in step 3 of the second start, and in step 9 of the fourth."""

    def build(self) -> Hook:
        return _Moments()


@dataclass(frozen=True, kw_only=True)
class Probing(Component):
    """SIGTERM while the third start writes its first checkpoint; a second SIGTERM while the fourth one writes its last."""

    def build(self, path: str | Path) -> LocalStore:
        def probe(operation: str, where: str) -> None:
            in_save = operation == "write" and ".saving-step" in where
            if in_save and START == 2 and not asked:
                asked.append("in a save")
                ask_to_stop()
                time.sleep(1.5)
            elif in_save and START == 3 and asked == ["in a step"]:
                asked.append("in the last save")
                time.sleep(2.5)  # sooner it would count as the first one
                ask_to_stop()
                time.sleep(60)

        return LocalStore(path, probe=probe)


class _Holding(Hook):
    def __init__(self, step: int) -> None:
        self.step = step

    def before_step(self, run: Any) -> None:
        if START == 0 and run.state.step == self.step:
            folder = Path(os.environ["MOMENTS"])
            (folder / "held").write_text(os.environ["SLURMD_NODENAME"])
            wait_for(lambda: run.stop.signals.asked or (folder / "go").exists(), "a file or a signal")


@dataclass(frozen=True, kw_only=True)
class Holds(Component):
    """The first start waits before a step for a signal, or for the file `go` in the folder MOMENTS."""

    step: int = 4

    def build(self) -> Hook:
        return _Holding(self.step)


class _Members(Hook):
    def before_step(self, run: Any) -> None:
        if START != 0 or os.environ.get("MOMENTS_OVER"):
            return
        if (run.job.job.seed, run.state.step) == (1, 4):
            task = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
            subprocess.run(["scancel", "--batch", "--signal=TERM", task], check=True, timeout=60)
            wait_for(lambda: run.stop.signals.asked, "SIGTERM from the script")
        elif (run.job.job.seed, run.state.step) == (2, 7):
            os.kill(os.getpid(), 9)


@dataclass(frozen=True, kw_only=True)
class Members(Component):
    """Of an array, the run with seed 1 is asked to stop, and the one with seed 2 is killed."""

    def build(self) -> Hook:
        return _Members()
