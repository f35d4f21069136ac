"""Campaigns of tiny runs, and records that a run would leave, with numbers that a test chooses."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_lab.campaigns.campaign import Campaign, read_campaign
from forge_lab.campaigns.execution import BoundedEnd
from forge_lab.sweep.execution import StopRequests
from forge_train.trackers import METRICS, JsonlTracker
from train.runs import TINY

LAYOUTS = """
title = "Layouts"
steps = 6
skip = 2
limit_minutes = 2

[common]
recipe = "tiny.toml"

[sets.layout.fsdp]
[sets.layout.tp]
parallel.tp = 2

[matrix]
layout = ["fsdp", "tp"]
world = [1, 2]

[[exclude]]
layout = "tp"
world = 1
"""


def campaign_of(folder: Path, text: str = LAYOUTS, overrides: Sequence[str] = ()) -> Campaign:
    """A campaign of a file with this text over the recipe `tiny.toml`; its results are in `folder/out`."""
    (folder / "tiny.toml").write_text(TINY)
    (folder / "layouts.toml").write_text(text)
    return read_campaign(folder / "layouts.toml", overrides, folder / "out")


def lines(seconds: Sequence[float], tokens: float = 128.0, **more: float) -> list[dict[str, float]]:
    """A line of metrics for each step, which took so many seconds."""
    return [{"loss": 4.0, "step_seconds": time, "tokens_per_second": tokens / time, **more} for time in seconds]


def write_metrics(run: Path, values: Sequence[Mapping[str, float]], every: int = 1) -> None:
    run.mkdir(parents=True, exist_ok=True)
    for number, line in enumerate(values, 1):
        JsonlTracker(run / METRICS).write(number * every, line)


def write_report(run: Path, device: str = "cpu", transforms: Sequence[str] = ()) -> None:
    machine = {"Device of rank 0": device, "Processor": "a processor"}
    report = {"machine": machine, "versions": {"torch": "2.13.0"}, "model": {"parameters": 1234, "transforms": list(transforms)}}
    (run / "report.json").write_text(json.dumps(report))


@dataclass
class FakeProcesses:
    """Ends at once; leaves the metrics of a run that took so many seconds a step.

    Attributes:
        seconds: of the steps of an entry, by its name.
        codes: exit codes that are not 0, and what is printed then.
        during: called while an entry "runs".
    """

    seconds: Callable[[str], Sequence[float]] = lambda name: [0.5] * 6
    codes: dict[str, tuple[int, str]] = field(default_factory=dict)
    during: Callable[[str], None] = lambda name: None
    commands: list[list[str]] = field(default_factory=list)

    @property
    def started(self) -> list[str]:
        return [next(Path(word).parent.name for word in command if word.endswith(".toml")) for command in self.commands]

    def __call__(
        self, command: Sequence[str], output: Path, limit: float, asked: StopRequests, look: Callable[[], Any]
    ) -> BoundedEnd:
        self.commands.append(list(command))
        name = output.parent.name
        self.during(name)
        if asked.times:
            return BoundedEnd(75, 1.0, stopped=True)
        code, text = self.codes.get(name, (0, ""))
        output.write_text(text)
        if code == 0:
            write_metrics(output.parent / "run", lines(self.seconds(name)))
            write_report(output.parent / "run")
        return BoundedEnd(code, 3.0, timed_out=code == -15)
