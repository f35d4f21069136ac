"""Records of runs with known times, written by hand: seconds of a made-up clock, as the files of a run have them."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

BEGIN = datetime(2026, 3, 1, 8, tzinfo=UTC)
EPOCH = BEGIN.timestamp()


def iso(seconds: float) -> str:
    return (BEGIN + timedelta(seconds=seconds)).isoformat(timespec="milliseconds")


def append(path: Path, line: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def begin(run: Path, mark: str, began: float | None, time: float, step: int = 0, **other: Any) -> None:
    """Records a start, by default of a process of another host."""
    metrics = run / "metrics.jsonl"
    size = metrics.stat().st_size if metrics.exists() else 0
    place = {"host": "elsewhere", "boot": "b", "pid": 7, "process": "1"}
    line = {"time": iso(time), "began": None if began is None else iso(began), "step": step, "max_steps": 100, "metrics": size}
    append(run / "starts.jsonl", {"start": mark, **line, "rollback": False, **place, **other})
    if size:
        append(metrics, {"rewind": step, "time": iso(time)})


def end(run: Path, mark: str, time: float, step: int, code: int | None = 0, status: str = "finished", **pauses: float) -> None:
    line = {"end": mark, "time": iso(time), "step": step, "code": code, "status": status, "pauses": pauses}
    append(run / "starts.jsonl", line)


def log(run: Path, step: int, time: float, loss: float = 2.5, step_seconds: float = 2.0, /, **more: Any) -> None:
    """A line of hook `log`; `save=3.0` are seconds that this start had waited for that hook."""
    waited = {f"pauses/{hook}": seconds for hook, seconds in more.items()}
    line = {"step": step, "time": iso(time), "loss": loss, "lr": 0.01, "step_seconds": step_seconds, **waited}
    append(run / "metrics.jsonl", line)


def first_start(run: Path, until: int = 35) -> None:
    """Steps of 2 s, a line at the first and at every fifth. The process begins at 0, owns the directory at 10, begins its first
    step at 12, which compiles for 6 s. It saves for 3 s after every tenth step, and evaluates for 4 s after step 20. Its line of
    step 35 has the time 12 + 6 + 35 * 2 + 3 * 3 + 4 = 101."""
    begin(run, "a", 0, 10)
    now, pauses = 12.0 + 6.0, {}
    for step in range(1, until + 1):
        now += 2.0
        if step == 1 or step % 5 == 0:
            log(run, step, now, 9 - step / 10, 8.0 if step == 1 else 2.0, **pauses)
        if step % 10 == 0:
            now, pauses["save"] = now + 3.0, pauses.get("save", 0.0) + 3.0
        if step == 20:
            append(run / "metrics.jsonl", {"step": step, "time": iso(now + 4.0), "evaluation/held_out/loss": 3.0})
            now, pauses["evaluate"] = now + 4.0, 4.0


def second_start(run: Path, step: int = 30, began: float = 150, mark: str = "b", **end_of_it: Any) -> None:
    """Goes on from a step, up to step 40: 5 s until it owns the directory, 4 s of compilation, steps of 2 s, then 3 s of a save
    and 4 s of an evaluation. From step 30 at 150, it ends at 186."""
    begin(run, mark, began, began + 5, step)
    now = began + 5 + 4.0
    for number in range(step + 1, 41):
        now += 2.0
        if number == step + 1 or number % 5 == 0:
            log(run, number, now, 9 - number / 10, 6.0 if number == step + 1 else 2.0)
    end(run, mark, now + 7, 40, **{"save": 3.0, "evaluate": 4.0, **end_of_it})
