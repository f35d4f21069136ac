"""The hook of a stormy run: gradients that are not finite where the storm wants them, a pace, and where the run stands.

A step that was bad once is bad in every later life of the run, and in the clean run that it is compared with: `bad-RANK` in the
storm's folder has their numbers.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Any

from forge_core.component import Component
from forge_core.protocols.run import Hook

FOLDER, PACE, FAULTY = "STORM_FOLDER", "STORM_PACE", "STORM_FAULTY_RESUME"
"""Variables: the storm's folder, least seconds of a step, and whether a resume leaves the samples of a step out, as one
with a fault would."""


class WeatherHook(Hook):
    def __init__(self) -> None:
        self.folder, self.pace = Path(os.environ[FOLDER]), float(os.environ.get(PACE, "0"))
        self.bad: set[int] = set()
        self.now = False

    def start(self, run: Any) -> None:
        self.rank = run.topology.rank
        self.wish, self.kept = self.folder / f"wish-{self.rank}", self.folder / f"bad-{self.rank}"
        if self.kept.exists():
            self.bad = {int(line) for line in self.kept.read_text().split()}
        next(module for name, module in run.model.parts[0].named_modules() if name.endswith("norm")).register_forward_hook(
            self._spoil
        )
        if run.resumed and os.environ.get(FAULTY):
            run.state.cursor = {**run.state.cursor, "sample": run.state.cursor["sample"] + run.job.train.global_batch}

    def before_step(self, run: Any) -> None:
        step = run.state.step + 1
        if self.wish.exists():
            with self.kept.open("a") as file:  # first: a step that was bad has to be on record
                file.write(f"{step}\n")
            self.wish.unlink()
            self.bad.add(step)
        self.now = step in self.bad
        sleep(self.pace)

    def after_step(self, run: Any, result: Any) -> None:
        if self.rank == 0:
            (self.folder / ".step").write_text(str(run.state.step))
            (self.folder / ".step").replace(self.folder / "step")

    def _spoil(self, module: Any, given: Any, output: Any) -> None:
        if self.now and output.requires_grad:
            output.register_hook(lambda gradient: gradient * float("nan"))


@dataclass(frozen=True, kw_only=True)
class Weather(Component):
    """The weather of a storm."""

    def build(self) -> Hook:
        return WeatherHook()
