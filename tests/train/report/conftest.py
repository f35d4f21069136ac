"""Runs that no training made: directories with the metrics, logs and summary that a test wants to see on a page."""

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

BEGIN = datetime(2026, 3, 1, 8, tzinfo=UTC)


def time_of(seconds: float) -> str:
    """As the tracker writes it."""
    return (BEGIN + timedelta(seconds=seconds)).isoformat(timespec="milliseconds")


def metrics(directory: Path, lines: Mapping[int, Mapping[str, Any]], *, seconds: float = 36.0) -> Path:
    """A run with a line for each step, `seconds` of training a step, in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    written = [{"step": step, "time": time_of(step * seconds), **values} for step, values in lines.items()]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written))
    return directory


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Path]:
    """Makes a run in a folder: losses of steps 1, 2, ..., and the summary of its end, where there is one."""

    def make(place: str, losses: list[float], /, **summary: Any) -> Path:
        directory = metrics(tmp_path / place, {step: {"loss": loss} for step, loss in enumerate(losses, 1)})
        if summary:
            (directory / "report.json").write_text(json.dumps(summary))
        return directory

    return make
