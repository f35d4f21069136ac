"""Trackers write the metrics of a run: JSON lines, TensorBoard, Weights & Biases. A tracker that fails does not stop the run.

After a resume, the steps since the checkpoint are trained again, and the earlier metrics of these steps become void:

- JSON lines: a line is `{"step": 120, "time": "2026-01-31T12:00:00.123+00:00", "loss": 3.2, ...}`, appended by a single system
  call. NaN and infinities, which JSON lacks, are the strings "nan", "inf" and "-inf"; `read_metrics` returns them as floats. A
  resume after step s appends `{"rewind": s, "time": ...}`, and `read_metrics` leaves out earlier lines of later steps. The file
  is never truncated, so it shows every start of the run and the steps that a crash lost.
- TensorBoard: a resume after step s starts a new event file with the "purge step" s + 1; TensorBoard ignores later steps in
  earlier files. One event holds all values of a write, as 32-bit floats.
- W&B: its own step never decreases, and it drops values of earlier steps. So every row has `step`, the axis of its charts, and
  `started_after`, the step from which this start resumed. A row is void if a later start has a `started_after` below its `step`.
"""

import importlib
import json
import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Gt

from forge_core.component import FREE, Component
from forge_core.errors import ForgeError
from forge_core.protocols.run import EndingTracker, EndStatus, Tracker
from forge_core.redaction import redacted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forge_core.protocols.run import Run


_log = logging.getLogger(__name__)


class SafeTracker:
    """Wraps a tracker so that failures do not stop the run: the first one is a warning, later ones are silent."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self.warned = False

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Passes on the values of optimizer step `step`."""
        self._try(lambda: self.tracker.write(step, values))

    def rewind(self, step: int) -> None:
        """Passes on that a run continues after `step`; 0 is the start of a run."""
        self._try(lambda: self.tracker.rewind(step))

    def end(self, status: EndStatus) -> None:
        """Passes on how the start ended, if the tracker shows that."""
        if isinstance(tracker := self.tracker, EndingTracker):
            self._try(lambda: tracker.end(status))

    def close(self) -> None:
        """Passes on that nothing more will be written."""
        self._try(self.tracker.close)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as cause:  # noqa: BLE001 - no error of a library, a disk or a network may stop training
            if not self.warned:
                self.warned = True
                what = type(self.tracker).__name__
                _log.warning("%s failed (%s: %s); the run goes on; later failures are silent", what, type(cause).__name__, cause)


def close_all(trackers: Sequence[Tracker], status: EndStatus) -> None:
    """Closes the trackers of a start that ended with this status."""
    for tracker in trackers:
        if isinstance(tracker, EndingTracker):
            tracker.end(status)
        tracker.close()


def import_library(name: str, extra: str) -> Any:
    """Imports a library that a tracker needs; `extra` is the extra of forge-train that installs it.

    Raises:
        ForgeError: the library is not installed; the error says what to install.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as cause:
        if (cause.name or "").partition(".")[0] != name.partition(".")[0]:
            raise  # the library is installed but lacks a dependency, which the original message names
        raise ForgeError(
            f'tracker {extra!r} needs a library that is not installed: pip install "forge-train[{extra}]"'
        ) from cause


METRICS = "metrics.jsonl"
"""File in the run's directory."""

_ODD = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class JsonlTracker:
    """Appends JSON lines to one file.

    Raises:
        OSError: the file cannot be written (`write` and `rewind`); the next write starts a new line after an incomplete one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._torn = _ends_inside_a_line(path)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Appends `values` of optimizer step `step` with the current time."""
        self._append({"step": step, "time": _now(), **{name: _number(value) for name, value in values.items()}})

    def rewind(self, step: int) -> None:
        """Marks lines after `step` as void, because a run continues from there; writes nothing to a file without steps."""
        if any("step" in item for item in json_objects(self.path)):
            self._append({"rewind": step, "time": _now()})

    def close(self) -> None:
        """Does nothing: the file is closed after each write."""

    def _append(self, entry: Mapping[str, Any]) -> None:
        line = json.dumps(entry, allow_nan=False).encode() + b"\n"
        if self._torn:
            line = b"\n" + line
        handle = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            written = os.write(handle, line)
        finally:
            os.close(handle)
        self._torn = written < len(line)
        if self._torn:
            raise OSError(f"only {written} of {len(line)} bytes were written to {self.path}")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the entries of the file in order, without void and incomplete lines; no entries if the file does not exist.

    `time` is text, `step` is an int, every other value is a float.
    """
    entries: list[dict[str, Any]] = []
    for item in json_objects(path):
        if "rewind" in item:
            entries = [entry for entry in entries if entry["step"] <= item["rewind"]]
        elif "step" in item:
            entries.append({name: _value(name, value) for name, value in item.items()})
    return entries


def metric_value(value: Any) -> float | None:
    """Returns a value of a metrics line as a float, also from the strings "nan", "inf" and "-inf"; None for other values."""
    if isinstance(value, str):
        return _ODD.get(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def json_objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yields all lines of the file, including void ones; `{}` for a line that is incomplete or not a JSON object."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in filter(str.strip, lines):
            try:
                item = json.loads(line)
            except ValueError:  # cut off by a kill or a full disk
                item = {}
            yield item if isinstance(item, dict) else {}


def _value(name: str, value: Any) -> Any:
    return _ODD.get(value, value) if isinstance(value, str) and name != "time" else value


def _number(value: float) -> float | int | str:
    if isinstance(value, int):
        return value
    value = float(value)
    return value if math.isfinite(value) else str(value)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _ends_inside_a_line(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            if not file.seek(0, os.SEEK_END):
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # the file does not exist, or the first write will report the error
        return False


class TensorBoardTracker:
    """Writes events with TensorBoard's own writer, whose thread flushes every `flush_seconds`.

    Raises:
        ForgeError: tensorboard is not installed.
    """

    def __init__(self, directory: Path, flush_seconds: float = 30.0) -> None:
        self.directory = directory
        self.flush_seconds = flush_seconds
        self._events = import_library("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summaries = import_library("tensorboard.compat.proto.summary_pb2", "tensorboard")
        self._files = import_library("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._open: Any = None

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds one event with the values of optimizer step `step`."""
        scalar = self._summaries.Summary.Value
        summary = self._summaries.Summary(value=[scalar(tag=name, simple_value=value) for name, value in values.items()])
        self._writer().add_event(self._events.Event(wall_time=time.time(), step=step, summary=summary))

    def rewind(self, step: int) -> None:
        """Marks values that earlier starts wrote after `step` as void; does nothing without earlier files."""
        if any(self.directory.glob("events.out.tfevents.*")):
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._writer().add_event(self._events.Event(wall_time=time.time(), step=step + 1, session_log=start))

    def close(self) -> None:
        """Flushes and closes the file."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _writer(self) -> Any:
        if self._open is None:
            self._open = self._files.EventFileWriter(str(self.directory), flush_secs=self.flush_seconds)
        return self._open


RUN_ID = "wandb-id"
"""File in the run's directory with the W&B run id, so that a resumed run keeps its id."""

FINISH_SECONDS = 120.0
"""Maximum seconds that the end of a run waits for uploads; unsent data stays in the folder, for `wandb sync`."""


class WandbTracker:
    """Writes to one W&B run for all starts of a run; `rewind`, which every start calls once, opens the connection.

    Sends the resolved recipe without secrets; does not send source code, command line or terminal output.

    Raises:
        ForgeError: wandb is not installed, or is online without an API key.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        config: Mapping[str, Any],
        *,
        project: str = "forge",
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
        mode: Literal["online", "offline"] | None = None,
    ) -> None:
        self._wandb = import_library("wandb", "wandb")
        _refuse_without_key(self._wandb, mode)
        self._directory, self._name, self._config = directory, name, config
        self._project, self._entity, self._group, self._tags, self._mode = project, entity, group, list(tags), mode
        self._after = 0
        self._run: Any = None

    def rewind(self, step: int) -> None:
        """Opens the W&B run, new or by its stored id; later rows have `started_after` = `step`."""
        self._after = step
        if self._run is None:
            self._run = self._start()
            self._run.define_metric("step", hidden=True)
            self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Logs one row; does nothing if the run could not be opened, because retrying at each step would delay training."""
        if self._run is not None:
            self._run.log({**values, "step": step, "started_after": self._after})

    def close(self) -> None:
        """Ends the W&B run and waits for pending uploads."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _start(self) -> Any:
        quiet = self._wandb.Settings(
            silent=True,
            console="off",  # the terminal belongs to the trainer
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            x_disable_meta=True,  # has the command line, which may contain a secret
            x_save_requirements=False,
            init_timeout=30.0,
            login_timeout=1.0,  # a run cannot answer a prompt
            finish_timeout=FINISH_SECONDS,
            finish_timeout_raises=True,
        )
        return self._wandb.init(
            project=self._project,
            entity=self._entity,
            group=self._group,
            tags=self._tags or None,
            name=self._name,
            id=run_id(self._directory),
            resume="allow",
            dir=str(self._directory),
            mode=self._mode,
            config=redacted(self._config),
            settings=quiet,
        )


def _refuse_without_key(wandb: Any, mode: str | None) -> None:
    """Raises a ForgeError if W&B would prompt for a key on the terminal while the other ranks wait."""
    online = mode in (None, "online") and wandb.setup().settings.mode == "online"
    if online and not wandb.login(prompt=False):
        raise ForgeError("tracker 'wandb' has no API key: run `wandb login`, set WANDB_API_KEY, or set mode = \"offline\"")


def run_id(directory: Path) -> str:
    """Returns the W&B id of the run in `directory`; creates it at the first call and stores it in a file."""
    path = directory / RUN_ID
    if path.is_file() and (known := path.read_text(encoding="utf-8").strip()):
        return known
    new = uuid.uuid4().hex[:12]
    path.write_text(new + "\n", encoding="utf-8")
    return new


@dataclass(frozen=True, kw_only=True)
class Jsonl(Component):
    """JSON lines in `metrics.jsonl` of the run's directory; every run writes them, even if its recipe lists no tracker."""

    def build(self, run: "Run") -> "Tracker":
        return JsonlTracker(run.directory / METRICS)


@dataclass(frozen=True, kw_only=True)
class TensorBoard(Component):
    """TensorBoard event files in `tensorboard/` of the run's directory; needs `pip install "forge-train[tensorboard]"`."""

    key_class: ClassVar = FREE

    flush_seconds: Annotated[float, Gt(0)] = 30.0
    """Maximum seconds that values stay in memory before they are written to the file."""

    def build(self, run: "Run") -> "Tracker":
        return TensorBoardTracker(run.directory / "tensorboard", flush_seconds=self.flush_seconds)


@dataclass(frozen=True, kw_only=True)
class Wandb(Component):
    """Weights & Biases, with the resolved recipe (secrets removed); needs `pip install "forge-train[wandb]"`."""

    key_class: ClassVar = FREE

    project: str = "forge"
    """Project that the run appears in."""
    entity: str | None = None
    """User or team that owns the project; by default that of the account."""
    group: str | None = None
    """Runs of one group are shown together."""
    tags: list[str] = field(default_factory=list)
    """Labels of the run."""
    mode: Literal["online", "offline"] | None = None
    """`offline` writes a folder that `wandb sync` uploads later; by default `WANDB_MODE` or W&B's own settings apply."""

    @classmethod
    def examples(cls, folder: "Path") -> "Iterable[Wandb]":
        return (cls(mode="offline"),)

    def build(self, run: "Run") -> "Tracker":
        return WandbTracker(
            directory=run.directory,
            name=run.job.job.name,
            config=run.config,
            project=self.project,
            entity=self.entity,
            group=self.group,
            tags=self.tags,
            mode=self.mode,
        )
