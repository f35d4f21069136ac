"""What a run left in its directory, finished or not, and what went wrong when."""

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
from forge_core.lines import lines_of
from forge_core.redaction import redacted, redacted_text
from forge_train.directory import ANSWERS, RECIPE, ROUTING, SAMPLES, SIMILARITY
from forge_train.report.curves import History
from forge_train.trackers import METRICS, json_objects

MOST_FAULTS = 200
"""Faults that the page lists; of more, the newest."""
FIRST_LOG, OTHER_LOGS = 4 * 2**20, 2**16
"""Bytes that are read at the end of a log: of rank 0, of each other rank."""

_LINE = re.compile(r"(?P<time>\d{4}-\d\d-\d\dT[\d:.]+)Z rank (?P<rank>\d+)/\d+ (?P<level>[A-Z]+) (?P<by>[\w.]+): (?P<text>.*)")
_STEP = re.compile(r"\bstep (\d+)")
_KINDS = {"WARNING": "warning", "ERROR": "error", "CRITICAL": "error"}


@dataclass(frozen=True)
class RunFault:
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


def run_faults(directory: Path, history: History) -> list[RunFault]:
    """Of a run, in the order of their time; what has none comes first."""
    found = [*_restarts(history), *_skipped(history), *_logged(directory, history)]
    return sorted(found, key=lambda fault: fault.time)


def _restarts(history: History) -> Iterator[RunFault]:
    for restart in history.restarts:
        lost = f"; steps up to {restart.reached} were trained again" if restart.reached > restart.after else ""
        yield RunFault("restart", restart.after, _seconds(restart.time), f"started again after step {restart.after}{lost}")


def _skipped(history: History) -> Iterator[RunFault]:
    """From the count that log lines carry; the lines about single steps in the log are summed up when there are many."""
    series, before = history.series.get("skipped_steps"), 0.0
    for step, total in zip(series.steps, series.values, strict=True) if series else ():
        if total > before:
            count = f"{total - before:.0f} step{'s' if total - before > 1 else ''}"
            yield RunFault("skipped", step, "", f"{count} with a loss or gradient that is not finite, up to step {step}: skipped")
        before = total


def _logged(directory: Path, history: History) -> Iterator[RunFault]:
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
        yield RunFault(_KINDS[level], _step_of(text, time, history), time, f"{who}{redacted_text(text)}{more}")


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


SUMMARY = "report.json"

_Is = Callable[[Any], bool]


def _of(*types: type) -> _Is:
    return lambda value: isinstance(value, types) and not isinstance(value, bool)


def _each(test: _Is) -> _Is:
    return lambda value: isinstance(value, list) and all(map(test, value))


def _values(test: _Is) -> _Is:
    return lambda value: isinstance(value, dict) and all(map(test, value.values()))


def _is_map(value: Any) -> bool:
    """Whether it is a table of numbers with a name for each row and column."""
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
    "config": lambda value: isinstance(value, str) or _each(_table)(value),
}
"""Keys of the summary and what they may hold; see `forge_train.report.page`."""


@dataclass
class RunRecord:
    """A run as its page shows it, without secrets.

    Attributes:
        label: what the run is called on the page; runs of one page have different ones.
        summary: of the end of the run, see `forge_train.report.page`; with newer ones of what hooks write in between.
        recipe: (dotted key, value, origin) of every key; empty without a recipe.
        notes: what could not be read.
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
        """How the run ended, or that no end of its newest start is recorded."""
        ended, last = self.summary.get("ended", ""), self.history.last
        if "status" in self.summary and not (ended and last > ended):
            return self.summary["status"]
        restarts = self.history.restarts
        began = (restarts[-1].time if restarts else self.history.first)[:19]
        errors = [fault.text for fault in self.faults if fault.kind == "error" and fault.time >= began]
        return f"broken off: {errors[-1]}" if errors else "going on, or broken off: its newest start has recorded no end"

    @property
    def config(self) -> dict[str, Any]:
        """Value of every key that has one."""
        return {key: value for key, value, _ in self.recipe if value is not None}


def is_run(directory: Path) -> bool:
    """Whether a run has begun to log there, or has ended there."""
    return (directory / METRICS).is_file() or (directory / SUMMARY).is_file()


def read_record(directory: Path, summary: Mapping[str, Any] | None = None) -> RunRecord:
    """The run in `directory`; `summary` takes the place of the one that its last end has left.

    Raises:
        DataError: it holds no run, or what it left cannot be read.
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
    """Without known keys that hold something else than they should, which is noted."""
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
    """The recipe of the end of the run, which knows origins; where a start came after it, that start's."""
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
