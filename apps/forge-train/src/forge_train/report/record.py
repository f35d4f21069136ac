"""Reads the files that a run, finished or not, left in its directory, and collects its faults."""

import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from forge_core.config.tree import build, leaves
from forge_core.errors import DataError
from forge_core.files import lines_of
from forge_core.redaction import redacted, redacted_text
from forge_train.directory import ANSWERS, RECIPE, ROUTING, SAMPLES, SIMILARITY
from forge_train.report.curves import History
from forge_train.trackers import METRICS, json_objects

MOST_FAULTS = 200
"""Maximum number of faults on the page; the newest are listed."""
FIRST_LOG, OTHER_LOGS = 4 * 2**20, 2**16
"""Bytes to read from the end of a log: of rank 0, and of each other rank."""

_LINE = re.compile(r"(?P<time>\d{4}-\d\d-\d\dT[\d:.]+)Z rank (?P<rank>\d+)/\d+ (?P<level>[A-Z]+) (?P<by>[\w.]+): (?P<text>.*)")
_STEP = re.compile(r"\bstep (\d+)")
_KINDS = {"WARNING": "warning", "ERROR": "error", "CRITICAL": "error"}


@dataclass(frozen=True)
class RunFault:
    """A warning, an error, a restart or skipped steps of a run.

    Attributes:
        kind: `warning`, `error`, `restart` or `skipped`.
        step: step of the fault; None before the first step.
        time: ISO time in UTC; empty if only the step is known.
    """

    kind: str
    step: int | None
    time: str
    text: str


def run_faults(directory: Path, history: History) -> list[RunFault]:
    """Returns the faults of a run sorted by time; faults without a time come first."""
    faults = [*_restarts(history), *_skipped(history), *_logged(directory, history)]
    return sorted(faults, key=lambda fault: fault.time)


def _restarts(history: History) -> Iterator[RunFault]:
    for restart in history.restarts:
        lost = f"; steps up to {restart.reached} were trained again" if restart.reached > restart.after else ""
        yield RunFault("restart", restart.after, _seconds(restart.time), f"started again after step {restart.after}{lost}")


def _skipped(history: History) -> Iterator[RunFault]:
    """Yields skipped steps from the counts in the metrics, since the log summarizes many skipped steps."""
    series, before = history.series.get("skipped_steps"), 0.0
    for step, total in zip(series.steps, series.values, strict=True) if series else ():
        if total > before:
            count = f"{total - before:.0f} step{'s' if total - before > 1 else ''}"
            yield RunFault("skipped", step, "", f"{count} with a loss or gradient that is not finite, up to step {step}: skipped")
        before = total


def _logged(directory: Path, history: History) -> Iterator[RunFault]:
    """Yields warnings and errors of the logs; a message of several ranks is listed once, at its earliest time."""
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
        yield RunFault(_KINDS[level], _step_of(text, time, history), time, f"{who}{redacted_text(text)}{more}")


def _records(text: str) -> Iterator[tuple[str, int, str, str]]:
    """Yields (time, rank, level, message) of warnings and errors; of a traceback, only the last line."""
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
    """Returns the last `most` bytes of a file as text; empty if the file cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - most))
            return file.read(most).decode("utf-8", "replace")
    except OSError:
        return ""


def _step_of(text: str, time: str, history: History) -> int | None:
    """Returns the step that a message names, else the newest step that was logged at that time."""
    if named := _STEP.search(text):
        return int(named[1])
    return history.clock.step_at(datetime.fromisoformat(f"{time}+00:00").timestamp())


def _seconds(time: str) -> str:
    """Returns an ISO time without fractions and zone; all times are UTC."""
    return time[:19]


SUMMARY = "report.json"

_Is = Callable[[Any], bool]


def _of(*types: type) -> _Is:
    return lambda value: isinstance(value, types) and not isinstance(value, bool)


def _each(test: _Is) -> _Is:
    return lambda value: isinstance(value, list) and all(map(test, value))


def _values(test: _Is) -> _Is:
    return lambda value: isinstance(value, dict) and all(map(test, value.values()))


def _is_map(value: Any) -> bool:
    """Returns True for a table of numbers with a name for each row and column."""
    if not isinstance(value, dict) or not _text(value.get("title")):
        return False
    rows, columns, values = (value.get(name, 0) for name in ("rows", "columns", "values"))
    if not (_each(_text)(rows) and _each(_text)(columns) and _each(_each(_of(int, float, type(None))))(values)):
        return False
    return [*map(len, values)] == [len(columns)] * len(rows)


_text, _number, _table = _of(str), _of(int, float), _of(dict)
_SHAPES: Mapping[str, _Is] = {
    **dict.fromkeys(("name", "status", "ended"), _text),
    **dict.fromkeys(("unigram_entropy", "seconds"), _number),
    **dict.fromkeys(("machine", "versions", "model"), _table),
    "bytes_per_token": _values(_number),
    "routing": lambda value: isinstance(value, dict) and _values(_each(_number))(value.get("layers")),
    "similarity": lambda value: isinstance(value, dict) and _each(_is_map)(value.get("maps")),
    "samples": _each(_table),
    "answers": _each(_table),
    "checkpoints": _each(lambda value: isinstance(value, dict) and _number(value.get("bytes", 0))),
    "warnings": _each(_text),
    "metrics": _each(_text),
    "config": lambda value: isinstance(value, str) or _each(_table)(value),
}
"""Checks of the values of summary keys; see `forge_train.report.page`."""


@dataclass
class RunRecord:
    """The contents of a run's page, without secrets.

    Attributes:
        label: name of the run on the page, unique on each page.
        summary: summary of the run's last end, see `forge_train.report.page`, with newer results of hooks.
        recipe: (dotted key, value, origin) of every key; empty without a recipe.
        notes: messages about files that could not be read.
    """

    label: str
    directory: Path = Path()
    summary: Mapping[str, Any] = field(default_factory=dict)
    history: History = field(default_factory=History)
    faults: Sequence[RunFault] = ()
    recipe: Sequence[tuple[str, Any, str]] = ()
    notes: Sequence[str] = ()

    @property
    def status(self) -> str:
        """How the run ended, or that its newest start has no recorded end."""
        ended, last = self.summary.get("ended", ""), self.history.last
        if "status" in self.summary and not (ended and last > ended):
            return self.summary["status"]
        restarts = self.history.restarts
        began = (restarts[-1].time if restarts else self.history.first)[:19]
        errors = [fault.text for fault in self.faults if fault.kind == "error" and fault.time >= began]
        return f"broken off: {errors[-1]}" if errors else "going on, or broken off: its newest start has recorded no end"

    @property
    def config(self) -> dict[str, Any]:
        """Values of all keys that are set."""
        return {key: value for key, value, _ in self.recipe if value is not None}


def is_run(directory: Path) -> bool:
    """Returns True if a directory has the metrics or the summary of a run."""
    return (directory / METRICS).is_file() or (directory / SUMMARY).is_file()


def read_record(directory: Path, summary: Mapping[str, Any] | None = None) -> RunRecord:
    """Reads the run in `directory`; `summary` replaces the stored summary of its last end.

    Raises:
        DataError: the directory has no run, or files of the run cannot be read.
    """
    if not is_run(directory):
        raise DataError(f"{directory} has neither {METRICS} nor {SUMMARY}: give a run's directory, such as runs/demo")
    notes: list[str] = []
    try:
        history = History.of(json_objects(directory / METRICS))
    except OSError as cause:
        raise DataError(f"{directory / METRICS} cannot be read: {cause.strerror}") from cause
    if history.unread:
        lines = "1 line" if history.unread == 1 else f"{history.unread} lines"
        notes.append(f"{lines} of {METRICS} left out: cut off, or damaged")
    kept = _checked(dict(_summary(directory)) if summary is None else dict(summary), notes)
    for name, file in (("samples", SAMPLES), ("answers", ANSWERS), ("routing", ROUTING), ("similarity", SIMILARITY)):
        newer = _json(directory / file, notes)
        kept |= _checked({} if newer is None else {name: redacted(newer)}, notes)
    return RunRecord(
        label=kept.get("name") or directory.resolve().name,
        directory=directory,
        summary=kept,
        history=history,
        faults=run_faults(directory, history),
        recipe=_recipe(directory, kept, history, notes),
        notes=notes,
    )


def _summary(directory: Path) -> Mapping[str, Any]:
    path = directory / SUMMARY
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as cause:
        raise DataError(f"{path} is not JSON ({cause}); remove it to write the report from {METRICS} alone") from cause
    if not isinstance(found, dict):
        raise DataError(f"{path} is not JSON of a run's end, but a {type(found).__name__}; remove it to write the report without")
    return found


def _checked(summary: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """Returns the summary without known keys whose values are invalid; adds a note for each."""
    kept = {key: value for key, value in summary.items() if value is not None}
    for key in [key for key, value in kept.items() if key in _SHAPES and not _SHAPES[key](value)]:
        notes.append(f"{key!r} of the run's files is not what it should be, and is left out")
        del kept[key]
    return kept


def _json(path: Path, notes: list[str]) -> Any:
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError):
        notes.append(f"{path.name} is not JSON, and is left out")
        return None


def _recipe(directory: Path, summary: Mapping[str, Any], history: History, notes: list[str]) -> list[tuple[str, Any, str]]:
    """Returns the recipe of the run's last end, which has origins, or of a later start if there is one."""
    kept = summary.get("config")
    newer = summary.get("ended") and history.last > summary["ended"]
    text, origin = (kept, "the run's recipe") if isinstance(kept, str) else ("", RECIPE)
    if isinstance(kept, list) and not newer:
        return [(str(row.get("key")), row.get("value"), str(row.get("origin", ""))) for row in kept]
    try:
        if (directory / RECIPE).is_file():
            text, origin = (directory / RECIPE).read_text(encoding="utf-8"), RECIPE
        tree = build(tomllib.loads(text), (), lambda _: origin, directory)
    except (ValueError, OSError):
        notes.append(f"{origin} is not TOML, and is left out")
        return []
    return [(key, redacted(value, key), redacted_text(origin)) for key, value, _ in leaves(tree)] if text else []
