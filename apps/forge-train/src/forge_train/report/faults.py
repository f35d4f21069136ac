"""What went wrong in a run, and when: starts after the first, skipped steps, warnings and errors of every rank's log."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from forge_core.lines import lines_of
from forge_core.redaction import redacted_text
from forge_train.report.history import History

MOST = 200
"""Faults that the page lists; of more, the newest."""
FIRST_LOG, OTHER_LOGS = 4 * 2**20, 2**16
"""Bytes that are read at the end of a log: of rank 0, of each other rank."""

_LINE = re.compile(r"(?P<time>\d{4}-\d\d-\d\dT[\d:.]+)Z rank (?P<rank>\d+)/\d+ (?P<level>[A-Z]+) (?P<by>[\w.]+): (?P<text>.*)")
_STEP = re.compile(r"\bstep (\d+)")
_KINDS = {"WARNING": "warning", "ERROR": "error", "CRITICAL": "error"}


@dataclass(frozen=True)
class Fault:
    """One of them.

    Attributes:
        kind: `warning`, `error`, `restart` or `skipped`.
        step: to which it belongs; None before the first one.
        time: in ISO form, UTC; empty where only the step is known.
    """

    kind: str
    step: int | None
    time: str
    text: str


def faults(directory: Path, history: History) -> list[Fault]:
    """Of a run, in the order of their time; what has none comes first."""
    found = [*_restarts(history), *_skipped(history), *_logged(directory, history)]
    return sorted(found, key=lambda fault: fault.time)


def _restarts(history: History) -> Iterator[Fault]:
    for restart in history.restarts:
        lost = f"; steps up to {restart.reached} were trained again" if restart.reached > restart.after else ""
        yield Fault("restart", restart.after, _seconds(restart.time), f"started again after step {restart.after}{lost}")


def _skipped(history: History) -> Iterator[Fault]:
    """From the count that log lines carry; the lines about single steps in the log are summed up when there are many."""
    series, before = history.series.get("skipped_steps"), 0.0
    for step, total in zip(series.steps, series.values, strict=True) if series else ():
        if total > before:
            count = f"{total - before:.0f} step{'s' if total - before > 1 else ''}"
            yield Fault("skipped", step, "", f"{count} with a loss or gradient that is not finite, up to step {step}: skipped")
        before = total


def _logged(directory: Path, history: History) -> Iterator[Fault]:
    """Warnings and errors; what several ranks say is listed once, at its earliest time."""
    said: dict[tuple[str, str, int], list[tuple[str, int]]] = {}
    for path in sorted((directory / "logs").glob("rank-*.log")):
        times: Counter[tuple[str, str]] = Counter()
        for time, rank, level, text in _records(_end_of(path, OTHER_LOGS if said else FIRST_LOG)):
            times[level, text] += 1
            said.setdefault((level, text, times[level, text]), []).append((time, rank))
    for (level, text, _), by in said.items():
        time, rank = min(by)
        who = f"rank {rank}: " if rank else ""
        more = f" (so do {len(by) - 1} more ranks)" if len(by) > 1 else ""
        yield Fault(_KINDS[level], _step_of(text, time, history), time, f"{who}{redacted_text(text)}{more}")


def _records(text: str) -> Iterator[tuple[str, int, str, str]]:
    """(time, rank, level, message) of warnings and worse; of a traceback, its last line."""
    found: re.Match[str] | None = None
    message = ""
    for line in [*lines_of(text), ""]:
        begins = _LINE.fullmatch(line)
        if begins is None and line.strip() and message.startswith("Traceback"):
            message = f"Traceback {line.strip()}"
        if begins is None and line:
            continue
        if found is not None and found["level"] in _KINDS and found["by"] != "py.warnings":
            yield _seconds(found["time"]), int(found["rank"]), found["level"], message.removeprefix("Traceback ")
        found, message = begins, begins["text"] if begins else ""


def _end_of(path: Path, most: int) -> str:
    """The last `most` bytes; nothing of a file that cannot be read. Half a line at its beginning counts as none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - most))
            return file.read(most).decode("utf-8", "replace")
    except OSError:
        return ""


def _step_of(text: str, time: str, history: History) -> int | None:
    """The step that a message names, else the newest one that was logged by then."""
    if named := _STEP.search(text):
        return int(named[1])
    return history.clock.step_at(datetime.fromisoformat(f"{time}+00:00").timestamp())


def _seconds(time: str) -> str:
    """An ISO time without fractions and zone, which is UTC everywhere."""
    return time[:19]
